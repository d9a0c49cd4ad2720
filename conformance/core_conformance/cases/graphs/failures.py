"""Promises about what goes wrong: keys never captured, captures that fail, and capturing again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from core.common.graphs.backend import GraphBackend, GraphKey
from core.device import Device, Mode
from core_conformance.cases.graphs.drive import (
    KEY,
    TOKENS,
    WIDTH,
    Captured,
    Subject,
    Tensors,
    Values,
    Watcher,
    can_run,
    check_replay,
    part,
    record,
    session,
    whole,
)
from core_conformance.cases.graphs.models import weighted
from core_conformance.cases.graphs.promises import EVERYWHERE, IN_PARTS, PARTS, Promise, Scope
from core_conformance.dtypes import working_dtype
from core_conformance.trial import Trial

BROKEN, LATER = GraphKey("decode", (4,)), GraphKey("decode", (2,))


class Planted(Exception):
    """The exception that a captured callable raises."""


def unknown_keys(trial: Trial, mode: Mode) -> None:
    """Ask for keys that are like the captured one, and for that one before and after it is captured."""
    backend = trial.device.graph_backend()
    own = [part(KEY, 0), part(KEY, 1)] if mode in PARTS else [KEY]
    for key in own:
        _refuse(trial, backend, key, "before any capture")
    backend.cleanup()  # nothing was captured yet
    with session(backend):
        captured = record(mode, backend, weighted(trial.device))
    others = [
        GraphKey("prefill", (8,)),
        GraphKey("decode", (4,)),
        GraphKey("decode", (8, 8)),
        GraphKey("decode", (8,), (("lora", False),)),
        part(KEY, 5),
        KEY if mode in PARTS else part(KEY, 0),
    ]
    for key in others:
        _refuse(trial, backend, key, f"with {KEY} captured")
    trial.require(can_run(captured), f"can_run({KEY}) is False after its capture")
    _check(trial, captured, "after refusals")
    captured.let_go()
    backend.cleanup()
    backend.cleanup()
    for key in own:
        _refuse(trial, backend, key, "after cleanup")


def _refuse(trial: Trial, backend: GraphBackend, key: GraphKey, when: str) -> None:
    trial.require(backend.can_run(key) is False, f"can_run({key}) is not False {when}")
    try:
        outputs = backend.replay(key)
    except Exception as error:
        trial.note(f"replay of a key not captured raises {type(error).__name__}")
    else:
        trial.fail(f"replay({key}) returns {len(outputs)} tensors {when}")


def _check(trial: Trial, captured: Captured, when: str, num_replays: int = 3) -> None:
    """Replay on changed inputs and compare."""
    for number in range(num_replays):
        check_replay(trial, captured, 70 + number, f"{captured.key} {when}, replay {number}")


def failed_capture(trial: Trial, mode: Mode, where: str) -> None:
    """Let a callable raise in one of its runs; all that was captured before, and is after, works."""
    device = trial.device
    backend = device.graph_backend()
    good, broken, later = (weighted(device, float(n)) for n in range(3))
    failing = _Failing(trial, broken, where)
    with session(backend):
        first = record(mode, backend, good, KEY)
        try:
            record(mode, backend, failing.subject, BROKEN, failing)
        except Exception as error:
            trial.require(_holds(error, Planted), f"the error does not lead to its cause: {error!r}")
        else:
            trial.fail("the callable raised, and capturing it did not")
        failing.check_untouched()
        failing.raises = False
        # In the same session, as core continues after a module that can't be captured.
        third = record(mode, backend, later, LATER)
    device.synchronize()
    key = part(BROKEN, 1) if mode in PARTS else BROKEN
    _refuse(trial, backend, key, "after its capture failed")
    _works(trial, device, "after a failed capture")
    for captured in (first, third, first):
        _check(trial, captured, "after a failed capture", 2)
    for captured in (first, third):
        captured.let_go()
    backend.cleanup()
    for name, again in (("the same backend", backend), ("another backend", device.graph_backend())):
        with session(again):
            captured = record(mode, again, failing.subject, BROKEN)
        _check(trial, captured, f"captured in {name} after it had failed")


class _Failing(Watcher):
    """Makes a subject raise: in its warm-up, or, from the moment `before` is called, in a recording."""

    def __init__(self, trial: Trial, plain: Subject, where: str) -> None:
        self._trial = trial
        self.raises = where == "warm-up"
        self.num_recordings = 0
        runs = torch.zeros((), dtype=torch.int64, device=plain.tensors["x"].device)
        self._skip = 1 if where == "second part" else 0

        def raising(run: Callable[..., Tensors]) -> Callable[..., Tensors]:
            def second(tensors: Values, *middle: Tensor) -> Tensors:
                tensors["runs"].add_(1)
                result = run(tensors, *middle)
                if self.raises:
                    raise Planted
                return result

            return second

        tensors = {**plain.tensors, "runs": runs}
        first, second = plain.first, plain.second
        if where == "first part":
            first = raising(first)
        else:
            second = raising(second)
        self.subject = replace(plain, tensors=tensors, first=first, second=second)

    def before(self) -> None:
        """Raise in the recording that begins now, if this is the one to break."""
        self._held = int(self.subject.tensors["runs"])
        self.raises = self.num_recordings == self._skip
        self.num_recordings += 1

    def check_untouched(self) -> None:
        """Require that the writes of the abandoned recording are undone."""
        if self.num_recordings:
            self._trial.device.synchronize()
            self._trial.same("what an abandoned recording wrote", int(self.subject.tensors["runs"]), self._held)


def _holds(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


def _works(trial: Trial, device: Device, when: str) -> None:
    """Run plain torch on the device, and read the result."""
    x = torch.ones(64, 64, dtype=working_dtype(device), device=device.torch_device)
    trial.same(f"torch on the device {when}", float((x @ x + 1).sum()), 64.0 * 64 * 65)


def host_read(trial: Trial, mode: Mode) -> None:
    """Capture a callable that reads a result on the host: a device refuses it, or renews what Python made of it."""
    device = trial.device
    plain, backend = weighted(device), device.graph_backend()
    reading = replace(plain, second=lambda tensors, product: (product * (product.sum().item() + 1),))
    plain.write(x=whole((TOKENS, WIDTH), 3, plain.tensors["x"]))
    captured = None
    with session(backend):
        try:
            captured = record(mode, backend, reading, BROKEN)
        except Exception as error:
            trial.note(f"a host read in a capture is refused: {type(error).__name__}")
        after = record(mode, backend, plain, KEY)
    device.synchronize()
    if captured is not None:
        _check(trial, captured, "with a host read in it")
    _works(trial, device, "after a host read in a capture")
    _check(trial, after, "after a host read in a capture")


def capture_again(trial: Trial, mode: Mode) -> None:
    """Capture a key again over the old one and after cleanup, in the same backend, several times."""
    backend = trial.device.graph_backend()
    for number in range(3):
        for again in range(1 + number % 2):  # sometimes over an existing graph of another callable
            by = 10.0 * number + 5 * again
            with session(backend):
                both = [
                    record(mode, backend, weighted(trial.device, by + each), key)
                    for each, key in enumerate((KEY, LATER))
                ]
            for each in (*both, *both):
                _check(trial, each, f"captured in round {number}, {again}", 1)
            for each in both:
                each.let_go()
        backend.cleanup()
        trial.require(not backend.can_run(both[0].key), f"can_run is True after cleanup {number}")


FAILURES = {
    "warm-up": "in its first run",
    "capture": "while it is recorded",
    "first part": "in the first of two recordings",
    "second part": "in the second of two recordings",
}


def _failed(where: str, name: str, scope: Scope = EVERYWHERE) -> Promise:
    return Promise(
        name=name,
        what=f"a callable that raises {FAILURES[where]} leaves device, backend and other graphs usable",
        run=partial(failed_capture, where=where),
        scope=scope,
    )


PROMISES = (
    Promise(name="unknown-keys", what="a key that was not captured is refused", run=unknown_keys),
    _failed("warm-up", "fails-in-warm-up"),
    _failed("capture", "fails-in-capture", scope=Scope(("full",), "what is captured is not recorded in one run")),
    _failed("first part", "fails-in-first-part", scope=IN_PARTS),
    _failed("second part", "fails-in-second-part", scope=IN_PARTS),
    Promise(name="host-read", what="a host read is refused at capture, or its value is renewed", run=host_read),
    Promise(name="capture-again", what="a backend captures again after cleanup, and over a key", run=capture_again),
)
