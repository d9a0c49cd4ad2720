"""The tests' interface to the simulated runtime: events, launches, failures on demand, memory, streams."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass

from simulator.library import NotSimulatedError, library

__all__ = [
    "CAPTURE",
    "STREAM",
    "Event",
    "MemoryUse",
    "NotSimulatedError",
    "clear",
    "fail_next",
    "forget_failures",
    "is_simulated",
    "kernels",
    "log",
    "memory",
    "not_computed",
    "stream_counts",
    "version",
]

# Names for fail_next; any function of ACL or any kernel (aclnn…) can be named too.
CAPTURE = "aclmdlRICaptureBegin"
STREAM = "aclrtCreateStream"
_LAUNCHES = ("launch", "capture", "update")


class _Entry(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 24),
        ("name", ctypes.c_char * 96),
        ("stream", ctypes.c_int32),
        ("graph", ctypes.c_int32),
        ("value", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class Event:
    """One event of the runtime."""

    #: launch, capture, update (a kernel was launched, for now, into a graph, or to replace arguments), run (its handler
    #: ran), copy, fill, record, wait, value_wait, value_write, synchronize, malloc, free, capture_begin, join, invalid,
    #: capture_end, group_begin, group_end, update_begin, update_end, replay, graph_destroy, deadlock, error, missing,
    #: not_computed, unsupported.
    kind: str
    #: Name of the function or kernel.
    name: str
    #: -1 where it does not apply.
    stream: int
    #: -1 where it does not apply.
    graph: int
    #: Bytes of a copy or of memory, the number of a task group or an event, or the code of an error.
    value: int


@dataclass(frozen=True)
class MemoryUse:
    """What is allocated on one device."""

    #: Bytes allocated now.
    used_bytes: int
    #: The most so far.
    peak_bytes: int
    #: Number of live blocks.
    num_blocks: int


def is_simulated() -> bool:
    """Whether this process runs under the simulated runtime."""
    try:
        library()
    except NotSimulatedError:
        return False
    return True


def version() -> str:
    """Return the version of the simulated runtime."""
    return str(library().ascend_sim_version().decode())


def log() -> list[Event]:
    """Return what happened since the last clear(), in order; raises where events were lost."""
    dropped = ctypes.c_int64()
    size = library().ascend_sim_log_size(ctypes.byref(dropped))
    if dropped.value:
        raise RuntimeError(f"log of the simulated runtime; found: {dropped.value} events lost; to do: clear() earlier")
    entries = (_Entry * size)()
    library().ascend_sim_log_read(ctypes.c_int64(0), ctypes.c_int64(size), entries)
    return [
        Event(entry.kind.decode(), entry.name.decode(errors="replace"), entry.stream, entry.graph, entry.value)
        for entry in entries
    ]


def clear() -> None:
    """Forget the events so far."""
    library().ascend_sim_log_clear()


def kernels(*kinds: str) -> list[str]:
    """Return the names of kernels launched since clear(), in order; kinds: launch, capture, update, run (default: all
    three kinds of launches)."""
    wanted = kinds or _LAUNCHES
    return [event.name for event in log() if event.kind in wanted and event.name.startswith(("acl", "Atb", "Hccl"))]


def not_computed() -> Counter[str]:
    """Count the launches that computed nothing, by kernel: refused ones, and in a permissive run those let through."""
    return Counter(event.name for event in log() if event.kind in ("missing", "not_computed"))


def fail_next(what: str, code: int, after: int = 0) -> None:
    """Let the next call of `what` fail with the ACL error `code`, once, after that many calls that still succeed."""
    if library().ascend_sim_fail_next(what.encode(), code, after):
        raise RuntimeError(f"failure of {what}; found: too many failures are pending; to do: forget_failures()")


def forget_failures() -> int:
    """Drop the failures that have not happened yet and return how many there were."""
    return int(library().ascend_sim_forget_failures())


def memory(device: int = 0) -> MemoryUse:
    """Return what is allocated from the runtime; torch_npu's caching allocator holds more than its tensors need."""
    now, highest, blocks = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    library().ascend_sim_memory(device, ctypes.byref(now), ctypes.byref(highest), ctypes.byref(blocks))
    return MemoryUse(now.value, highest.value, blocks.value)


def stream_counts() -> tuple[int, int]:
    """Return how many streams exist, and how many more the captured graphs hold."""
    own, graphs = ctypes.c_int64(), ctypes.c_int64()
    library().ascend_sim_counts(ctypes.byref(own), ctypes.byref(graphs))
    return own.value, graphs.value
