"""Memory of this process and machine, from the operating system: torch's CPU allocator keeps no account."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

from core.device import MemoryInfo

_PROC = Path("/proc/self")
_GROUPS = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files with the memory limit of a control group (as of a container): versions 2 and 1."""


def read_memory() -> MemoryInfo:
    """Return resident memory of the process, and what it may come to use.

    The latter is the least of the machine's memory, the process's memory plus the available memory, and the limit of
    its control group.
    """
    total = min(_physical(), *_limits())
    try:
        fields = dict(line.split(":", 1) for line in (_PROC / "status").read_text().splitlines() if ":" in line)
        used, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError):
        # Without /proc only the peak of the process's life is known, in KiB, on macOS in bytes.
        scale = 1 if sys.platform == "darwin" else 1024
        used = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    available = _available()
    total = total if available is None else min(total, used + available)
    return MemoryInfo(used_bytes=used, total_bytes=total, peak_bytes=peak)


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits() -> list[int]:
    """Return the limit of the control group; the machine's memory where there is none."""
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            return [int((_GROUPS / name).read_text())]
    return [_physical()]


def _available() -> int | None:
    """Return what the system could give without swapping; None where it doesn't say."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def reset_peak_memory() -> None:
    """Start a new measurement of the peak.

    Only a Linux kernel that lets the process write its own clear_refs can do that; elsewhere the peak stays that of the
    process's life.
    """
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")
