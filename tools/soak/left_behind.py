"""What a command leaves on this machine when it has ended: processes, temporary files and shared memory.

Of everything but shared memory the environment variable TMPDIR tells what is the command's: whatever it starts
inherits it. Shared memory has no such mark; what counts is new, and nobody has it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

_SEGMENTS = Path("/dev/shm")
_CACHES = "torchinductor_"
"""Beginning of the name of torch's own folder of compiled code, which it keeps for later."""
_SYSTEM_V = Path("/proc/sysvipc/shm")


class Traces:
    """What is left of a command that gets `folder` as its TMPDIR; made before the command starts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._segments = _segments()

    def processes(self) -> list[int]:
        """Return the processes that run with this TMPDIR."""
        mark = f"TMPDIR={self.folder}".encode()
        return [number for number, path in _processes() if mark in _bytes(path / "environ").split(b"\0")]

    def found(self) -> list[str]:
        """Return what is left, a line each."""
        held = _held()
        return [
            *(f"process {number}" for number in self.processes()),
            *(f"file {path.name}" for path in sorted(self.folder.iterdir()) if not path.name.startswith(_CACHES)),
            *(f"shared memory {name}" for name in sorted(_segments() - self._segments) if name not in held),
        ]

    def settled(self, timeout_s: float = 10.0) -> list[str]:
        """Return what is left once nothing changes for the better, or after the time: a process takes time to end."""
        deadline = time.monotonic() + timeout_s
        while (found := self.found()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


def _segments() -> set[str]:
    """Return the names of segments: those of POSIX, and of System V those that nobody has attached."""
    rows = [line.split() for line in _bytes(_SYSTEM_V).decode().splitlines()[1:]]
    loose = {f"of System V, {shmid}" for _, shmid, *rest in rows if rest[4] == "0"}
    return loose | ({path.name for path in _SEGMENTS.iterdir()} if _SEGMENTS.is_dir() else set())


def _held() -> set[str]:
    """Return the names of the segments that a process has mapped or open."""
    held: set[str] = set()
    for _, path in _processes():
        lines = _bytes(path / "maps").decode(errors="replace").splitlines()
        held |= {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
        names = (_target(file) for file in _entries(path / "fd"))
        held |= {name.removeprefix("/dev/shm/") for name in names if name.startswith("/dev/shm/")}
    return held


def _processes() -> Iterator[tuple[int, Path]]:
    for path in Path("/proc").glob("[0-9]*"):
        yield int(path.name), path


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # of a process that has ended, or of another user
        return []


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
