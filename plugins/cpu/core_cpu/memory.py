"""Memory of this process and machine, from the operating system: torch's CPU allocator keeps no account."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

from core.device import MemoryInfo

_PROC = Path("/proc/self")


def read_memory() -> MemoryInfo:
    """Return resident memory of the process and physical memory of the machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        fields = dict(line.split(":", 1) for line in (_PROC / "status").read_text().splitlines() if ":" in line)
        used, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError):
        # Without /proc only the peak of the process's life is known, in KiB, on macOS in bytes.
        scale = 1 if sys.platform == "darwin" else 1024
        used = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    return MemoryInfo(used_bytes=used, total_bytes=total, peak_bytes=peak)


def reset_peak_memory() -> None:
    """Start a new measurement of the peak.

    Only a Linux kernel that lets the process write its own clear_refs can do that; elsewhere the peak stays that of the
    process's life.
    """
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")
