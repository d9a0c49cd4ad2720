"""A command that ends with the process that started it: `python -m core.cli.child PID …`, PID that process's."""

from __future__ import annotations

import signal
import sys

from core.cli import main
from core.cli.supervision import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})  # whoever started it may hold them back
    sys.exit(main())
