"""Promises about memory: graphs, and failed captures too, give their memory back, and the device's account shows it."""

from __future__ import annotations

import gc
from functools import partial

from core.common.collector import frozen
from core.device import Device, MemoryInfo, Mode
from core_conformance.cases.graphs.drive import Captured, Subject, Tensors, Values, Watcher, like, record, session
from core_conformance.cases.graphs.failures import Planted
from core_conformance.cases.graphs.promises import GRAPHS, Promise, Scope
from core_conformance.dtypes import working_dtype
from core_conformance.rules.tolerances import MEMORY_ALLOWANCE_BYTES, MEMORY_PROBE_BYTES
from core_conformance.trial import Trial

ROUNDS = 3


class _Raise(Watcher):
    """Makes the first recording fail, with memory taken in it."""

    raises = False

    def before(self) -> None:
        """Raise in what is recorded next."""
        self.raises = True


def settled(device: Device) -> MemoryInfo:
    """Return the device's account after all work is done and unused memory is released."""
    gc.collect()
    device.synchronize()
    device.parts.empty_cache()
    return device.parts.memory()


def _large_subject(device: Device, failing: _Raise | None = None) -> Subject:
    x = like(device).new_ones(MEMORY_PROBE_BYTES // working_dtype(device).itemsize)

    def first(tensors: Values) -> Tensors:
        result = tensors["x"] + 1
        if failing is not None and failing.raises:
            raise Planted
        return (result,)

    return Subject(tensors={"x": x}, first=first, second=lambda tensors, y: (y * 2, y - 1))


def _check_account(trial: Trial, info: MemoryInfo, when: str) -> None:
    trial.require(info.used_bytes >= 0 and info.total_bytes > 0, f"{when}: {info}")
    trial.require(info.total_bytes >= info.taken_bytes >= info.used_bytes or info.held_bytes is None, f"{when}: {info}")
    trial.require(info.total_bytes >= info.used_bytes, f"{when}: more in use than there is: {info}")
    trial.require(info.peak_bytes >= info.used_bytes, f"{when}: the peak is below what is in use: {info}")


def given_back(trial: Trial, mode: Mode, *, fails: bool) -> None:
    """Capture large tensors, replay, drop all, several times over; the first round may leave libraries' workspaces."""
    device = trial.device
    levels = []
    with frozen():  # collections skip objects that existed before
        before = settled(device)
        _check_account(trial, before, "at first")
        for number in range(ROUNDS + 1):
            device.parts.reset_peak_memory()
            if fails:
                _fail(trial, device, mode)
            else:
                _hold(trial, device, mode, before)
            before = settled(device)
            _check_account(trial, before, f"after round {number}")
            levels.append(before.taken_bytes)
    grown = levels[-1] - levels[0]
    trial.record("bytes kept after all rounds", "T0", max(grown, 0) / MEMORY_ALLOWANCE_BYTES, _text(levels, grown))


def _text(levels: list[int], grown: int) -> str:
    if grown <= MEMORY_ALLOWANCE_BYTES:
        return ""
    after = ", ".join(f"{level / 2**20:.1f}" for level in levels)
    return f"MiB taken when all was dropped, round by round: {after}; each had taken {MEMORY_PROBE_BYTES >> 20} or more"


def _hold(trial: Trial, device: Device, mode: Mode, before: MemoryInfo) -> None:
    subject, backend = _large_subject(device), device.graph_backend()
    with session(backend):
        captured: Captured = record(mode, backend, subject)
    outputs = captured.replay()
    trial.require(_ends(outputs) == [4.0, 4.0, 1.0, 1.0], f"a replay gave {_ends(outputs)}")
    held = settled(device)
    _check_account(trial, held, "with a graph held")
    rise = held.taken_bytes - before.taken_bytes
    trial.require(
        rise >= MEMORY_PROBE_BYTES // 2,
        f"the account rose by {rise} bytes for tensors and graphs of {3 * MEMORY_PROBE_BYTES} and more",
    )
    captured.let_go()
    backend.cleanup()


def _ends(outputs: Tensors) -> list[float]:
    return [float(value) for output in outputs for value in (output[0], output[-1])]


def _fail(trial: Trial, device: Device, mode: Mode) -> None:
    watcher = _Raise()
    subject, backend = _large_subject(device, watcher), device.graph_backend()
    raised = False
    try:
        with session(backend):
            record(mode, backend, subject, watcher=watcher)
    except Exception:
        raised = True
    trial.require(raised, "the callable raised, and capturing it did not")
    backend.cleanup()


PROMISES = (
    Promise(
        name="memory",
        what="memory in use rises while graphs are held, and is back when they are dropped",
        run=partial(given_back, fails=False),
        exclusive=True,
    ),
    Promise(
        name="memory-after-failure",
        what="a capture that fails gives back what it took",
        run=partial(given_back, fails=True),
        scope=Scope(GRAPHS, "nothing is recorded in this mode"),
        exclusive=True,
    ),
)
