"""Promises that hold however many there are: replays, keys, ops in a graph, programs, and memory after all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from core.common.collector import frozen
from core.common.graphs.backend import GraphKey
from core.device import Device, Mode
from core_conformance.cases.graphs.drive import (
    TOKENS,
    WIDTH,
    Captured,
    Subject,
    Tensors,
    Values,
    Wanted,
    capture,
    check_replay,
    like,
    record,
    session,
    whole,
)
from core_conformance.cases.graphs.memory import settled
from core_conformance.cases.graphs.models import weighted, x_and_weight
from core_conformance.cases.graphs.promises import Promise
from core_conformance.rules.tolerances import GROWTH_ALLOWANCE_BYTES
from core_conformance.trial import Trial

COMPARED = (1, 10, 100, 300, 600)
"""The numbers of replays after which results are compared; the last is the total."""
INPUTS = 16
NUM_PAIRS = 300
"""Pairs of ops in each part of a long graph."""
NUM_PROGRAMS = 8
PLANES = ((2, 6), (3, 4), (4, 3), (12, 1), (6, 2), (1, 12))
"""Dimensions whose products are all that of (12,), which is a key as well."""
KEYS = (*(GraphKey("decode", (4 * number,)) for number in range(1, 19)), *(GraphKey("decode", dims) for dims in PLANES))
STRIDE = 5
"""A step that has no common divisor with the number of keys or programs, so that each comes up once."""
WARM_REPLAYS, REPLAYS, REPLAYS_A_STEP = 100, 400, 50
WARM_CAPTURES, CAPTURES, CAPTURES_A_STEP = 10, 40, 10
STATUS = Path("/proc/self/status")
_T = TypeVar("_T")


def _counting(device: Device) -> Subject:
    """Return x · weight plus the number of runs so far, and that number, which every run raises in place."""
    tensors = x_and_weight(device) | {"runs": torch.zeros(1, dtype=torch.int64, device=device.torch_device)}

    def first(tensors: Values) -> Tensors:
        tensors["runs"].add_(1)
        return (tensors["x"] * tensors["weight"],)

    def second(tensors: Values, product: Tensor) -> Tensors:
        return product + tensors["runs"].remainder(INPUTS - 1).to(product.dtype), tensors["runs"] * 1

    return Subject(tensors=tensors, first=first, second=second)


def many_replays(trial: Trial, mode: Mode) -> None:
    """Replay beside a twin that runs uncaptured; compare a few times, since errors in between change the count of
    runs."""
    subject = _counting(trial.device)
    captured = capture(trial.device, mode, subject)
    subject.tensors["runs"].zero_()
    twin = subject.twin()
    inputs = [whole((TOKENS, WIDTH), 50 + number, subject.tensors["x"]) for number in range(INPUTS)]
    for number in range(1, COMPARED[-1] + 1):
        x = inputs[number % INPUTS]
        for each in (subject, twin):
            each.write(x=x)
        wanted = Wanted(trial, twin) if number in COMPARED else None
        twin.run()
        outputs = captured.replay()
        if wanted is not None:
            wanted.check(f"replay {number}", outputs)


def many_keys(trial: Trial, mode: Mode) -> None:
    """Capture many keys with one backend, some of them alike in their dimensions, and replay them in other orders."""
    device, backend = trial.device, trial.device.graph_backend()
    with session(backend):
        captured = {key: record(mode, backend, weighted(device, float(n)), key) for n, key in enumerate(KEYS)}
        device.synchronize()
    for number, key in enumerate([*_strided(KEYS), *reversed(KEYS)]):
        check_replay(trial, captured[key], number, f"{key}, call {number}, of {len(KEYS)} keys")


def _strided(found: tuple[_T, ...]) -> list[_T]:
    return [found[number * STRIDE % len(found)] for number in range(len(found))]


def many_ops(trial: Trial, mode: Mode) -> None:
    """Capture a long chain of ops, of which none can be left out without a change of the result."""

    def first(tensors: Values) -> Tensors:
        return _count(tensors["x"], tensors["x"])

    def second(tensors: Values, written: Tensor, passed: Tensor) -> Tensors:
        return _count(written - NUM_PAIRS // 2, passed - NUM_PAIRS // 2)

    x = whole((TOKENS, WIDTH), 1, like(trial.device))
    captured = capture(trial.device, mode, Subject(tensors={"x": x}, first=first, second=second))
    for number in range(3):
        check_replay(trial, captured, 60 + number, f"replay {number} of {2 * NUM_PAIRS} ops and more a graph")


def _count(written: Tensor, passed: Tensor) -> Tensors:
    """Count up from below zero: every dtype holds these numbers exactly. One in place, one through temporaries."""
    written, passed = written - NUM_PAIRS // 2, passed - NUM_PAIRS // 2
    for _ in range(NUM_PAIRS):
        written.add_(1)
        passed = passed + 1
    return written, passed


def many_programs(trial: Trial, mode: Mode) -> None:
    """Hold several programs, each with a backend of its own, and replay them in turns."""
    found = tuple(capture(trial.device, mode, weighted(trial.device, float(number))) for number in range(NUM_PROGRAMS))
    turns = tuple(range(NUM_PROGRAMS))
    for number, program in enumerate([*turns, *_strided(turns), *reversed(turns)]):
        check_replay(trial, found[program], 70 + number, f"program {program} of {NUM_PROGRAMS}, call {number}")
    for captured in found:
        captured.let_go()
        captured.backend.cleanup()


def memory_many(trial: Trial, mode: Mode) -> None:
    """Replay one graph often, then capture and drop one often: after a warm-up neither may take more and more."""
    device = trial.device
    if _resident() is None:
        trial.note(f"the size of the process was not looked at: {STATUS} can't be read")
    with frozen():  # collections skip objects that existed before
        subject = _counting(device)
        captured = capture(device, mode, subject)
        _repeat(captured.replay, WARM_REPLAYS)
        _watch(trial, "replays", captured.replay, REPLAYS, REPLAYS_A_STEP)
        captured.let_go()
        captured.backend.cleanup()

        def once() -> None:
            dropped: Captured = capture(device, mode, subject)
            dropped.let_go()
            dropped.backend.cleanup()

        _repeat(once, WARM_CAPTURES)
        _watch(trial, "captures", once, CAPTURES, CAPTURES_A_STEP)


def _repeat(run: Callable[[], object], count: int) -> None:
    for _ in range(count):
        run()


def _watch(trial: Trial, what: str, run: Callable[[], object], count: int, step: int) -> None:
    """Require that no measure grows by more than the allowance; stop early, before a leak exhausts the machine."""
    before, grown, done = _sizes(trial.device), {"": 0}, 0
    while done < count and max(grown.values()) <= GROWTH_ALLOWANCE_BYTES:
        _repeat(run, step)
        done += step
        grown = {name: size - before[name] for name, size in _sizes(trial.device).items()}
    for name, size in grown.items():
        over = f"{size / 2**20:.1f} MiB more after {done} {what}, kept by none of them"
        reason = over if size > GROWTH_ALLOWANCE_BYTES else ""
        trial.record(f"{name}, over many {what}", "T0", max(size, 0) / GROWTH_ALLOWANCE_BYTES, reason)


def _sizes(device: Device) -> dict[str, int]:
    taken, resident = settled(device).taken_bytes, _resident()
    return {"memory of the device": taken} | ({} if resident is None else {"memory of the process": resident})


def _resident() -> int | None:
    """Return the resident size of this process in bytes; None if the system does not report it."""
    with suppress(AttributeError, OSError, TypeError):
        # Return freed memory to the system: what the C library keeps from earlier cases would hide a leak. Only glibc
        # has this call.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return None


PROMISES = (
    Promise(name="many-replays", what=f"replay {COMPARED[-1]} is as right as the first", run=many_replays),
    Promise(name="many-keys", what=f"each of {len(KEYS)} keys of one program replays its own graph", run=many_keys),
    Promise(name="many-ops", what=f"a graph of {2 * NUM_PAIRS} ops and more is replayed to its end", run=many_ops),
    Promise(name="many-programs", what=f"{NUM_PROGRAMS} programs alive replay in turns", run=many_programs),
    Promise(
        name="memory-many",
        what="neither the device nor the process takes more with each replay or capture",
        run=memory_many,
        exclusive=True,
    ),
)
