"""A command that ends with the process that started it: `python -m core.cli.child PID …`, PID that process's."""

from __future__ import annotations

import sys

from core.cli import main
from core.cli.supervision import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    sys.exit(main())
