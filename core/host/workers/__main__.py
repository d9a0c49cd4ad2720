"""The entry of every worker process: `python -m core.host.workers MODULE FOLDER…` answers requests by `MODULE.answer`.

FOLDER: metadata of a damaged distribution, which the process that starts this one has set aside.
"""

from __future__ import annotations

import sys

from core.host.distributions.isolation import set_aside
from core.host.workers.channel import serve

if __name__ == "__main__":
    set_aside(sys.argv[2:])
    serve(sys.argv[1])
