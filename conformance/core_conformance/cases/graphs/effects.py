"""Promises about what capture and replay leave behind: writes once per replay, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.device import Device, Mode
from core_conformance.cases.graphs.drive import (
    TOKENS,
    WIDTH,
    Captured,
    Subject,
    Tensors,
    Values,
    Wanted,
    Watcher,
    capture,
    check_same,
    record,
    session,
    whole,
)
from core_conformance.cases.graphs.models import weighted, writer
from core_conformance.cases.graphs.promises import Promise
from core_conformance.rules import oracle
from core_conformance.trial import Trial

ROUNDS = 4


class _Unchanged(Watcher):
    """Compares the content of tensors and the random state before and after each recording."""

    def __init__(self, trial: Trial, tensors: Values) -> None:
        self._trial, self._tensors = trial, tensors
        self.num_recordings = 0

    def before(self) -> None:
        """Save the state after the warm-up."""
        self._trial.device.synchronize()
        self._held, self._state = oracle.own(self._tensors), random_state(self._trial.device)

    def after(self) -> None:
        """Compare the saved state with the state after the recording."""
        self._trial.device.synchronize()
        self.num_recordings += 1
        for name, held in self._held.items():
            self._trial.same(f"{name!r} after recording {self.num_recordings}", self._tensors[name], held)
        for name, state in random_state(self._trial.device).items():
            self._trial.same(f"{name} after recording {self.num_recordings}", state, self._state[name])


def random_state(device: Device) -> dict[str, Tensor]:
    """Return the states of the random generators of the host and, where it has one of its own, of the device."""
    states = {"the host's random state": torch.get_rng_state()}
    module: Any = getattr(torch, device.torch_device.type, None)
    if hasattr(module, "get_rng_state"):
        states["the device's random state"] = module.get_rng_state(device.torch_device)
    return states


def no_side_effects(trial: Trial, mode: Mode) -> None:
    """Look at everything that a captured callable reads and writes, before and after the recording itself."""
    subject = writer(trial.device)
    warmed: list[Tensor] = []

    class Counting(_Unchanged):
        def before(self) -> None:
            warmed.append(subject.tensors["runs"][0].clone())
            super().before()

    watcher = Counting(trial, subject.tensors)
    captured = capture(trial.device, mode, subject, watcher=watcher)
    asked = 2 if captured.in_parts else 1
    trial.require(len(warmed) == asked, f"`after_warmup` was called {len(warmed)} times, not {asked}")
    trial.require(bool(warmed) and int(warmed[0]) >= 1, "the callable was not run before `after_warmup`")
    Wanted(trial, subject).check("a replay after the capture", captured.replay())


def writes_once(trial: Trial, mode: Mode) -> None:
    """Count what replays write into state, directly and through views, beside an uncaptured twin."""
    subject = writer(trial.device)
    captured = capture(trial.device, mode, subject)
    twin = subject.twin()
    generator = torch.Generator().manual_seed(trial.seed)
    for number in range(2 * ROUNDS):
        # Every second replay has the inputs of the one before, so that a replay that does nothing is caught too.
        if number % 2 == 0:
            slots = torch.randperm(len(subject.tensors["cache"]), generator=generator)[:TOKENS]
            for each in (subject, twin):
                each.write(x=whole((TOKENS, WIDTH), 50 + number, subject.tensors["x"]), slots=slots)
        wanted = twin.run()
        check_same(trial, f"replay {number}", captured.replay(), wanted)
        trial.device.synchronize()
        for name, tensor in twin.tensors.items():
            trial.same(f"{name!r} after {number + 1} replays", subject.tensors[name], tensor)


def random_state_stays(trial: Trial, mode: Mode) -> None:
    """Capture and replay what draws nothing, and record what draws: neither moves a generator on."""
    device = trial.device
    plain = weighted(device)
    before = random_state(device)
    captured = capture(device, mode, plain)
    for _ in range(2):
        captured.replay()
    device.synchronize()
    for name, state in random_state(device).items():
        trial.same(f"{name} after capture and replays of what draws nothing", state, before[name])
    subject = _drawing(plain)
    _capture_drawing(trial, mode, subject, _Unchanged(trial, subject.tensors))


def _capture_drawing(trial: Trial, mode: Mode, subject: Subject, watcher: Watcher | None = None) -> Captured | None:
    """Capture what draws random numbers; return None where the device refuses that."""
    try:
        return capture(trial.device, mode, subject, watcher=watcher)
    except Exception as error:
        trial.note(f"what draws random numbers is refused: {type(error).__name__}")
        return None


def random_numbers(trial: Trial, mode: Mode) -> None:
    """Replay a callable that draws: a device refuses it at capture, or draws anew at each replay."""
    subject = _drawing(weighted(trial.device))
    subject.tensors["x"].fill_(1)
    captured = _capture_drawing(trial, mode, subject)
    if captured is None:
        return
    drawn = []
    for number in range(3):
        uniform, dropped = (output.clone().cpu() for output in captured.replay())
        trial.require(bool(((uniform >= 0) & (uniform <= 1)).all()), f"replay {number}: rand gave {uniform}")
        kept = dropped[dropped != 0]
        trial.require(bool((kept == 2).all()), f"replay {number}: dropout of 1/2 gave other values than 0 and 2")
        share = kept.numel() / dropped.numel()
        trial.require(0.25 < share < 0.75, f"replay {number}: dropout of 1/2 kept {share:.0%}")
        drawn.append((uniform, dropped))
    for index, name in enumerate(("rand", "dropout")):
        first, second = drawn[0][index], drawn[1][index]
        trial.require(not torch.equal(first, second), f"two replays in a row gave the same {name}")


def _drawing(plain: Subject) -> Subject:
    """Return a subject that draws uniform numbers, and drops half of x, in the second graph."""

    def second(tensors: Values, product: Tensor) -> Tensors:
        return torch.rand_like(product), functional.dropout(tensors["x"], 0.5, training=True)

    return replace(plain, second=second)


def two_programs(trial: Trial, mode: Mode) -> None:
    """Replay two programs in turns, and drop one of them: the other's graphs, state and results stay."""
    device = trial.device
    subjects = [writer(device) for _ in range(2)]
    twins = [subject.twin() for subject in subjects]
    both = [capture(device, mode, subject) for subject in subjects]
    for subject, twin in zip(subjects, twins, strict=True):
        subject.write(**twin.tensors)

    def turn(which: int, number: int) -> tuple[Tensors, Tensors]:
        x = whole((TOKENS, WIDTH), 60 + 10 * which + number, subjects[which].tensors["x"])
        for each in (subjects[which], twins[which]):
            each.write(x=x)
        return both[which].replay(), twins[which].run()

    for number in range(ROUNDS):
        first, second = turn(0, number), turn(1, number)
        check_same(trial, f"program 0, call {number}, after a replay of the other", *first)
        check_same(trial, f"program 1, call {number}", *second)
    both[1].let_go()
    both[1].backend.cleanup()
    check_same(trial, "program 0 when the other one was dropped", *first)
    with session(both[1].backend):
        both[1] = record(mode, both[1].backend, subjects[1])
    subjects[1].write(**twins[1].tensors)
    check_same(trial, "program 0 when the other one was captured again", *first)
    for number in range(ROUNDS, ROUNDS + 2):
        for which in (0, 1):
            check_same(trial, f"program {which}, call {number}", *turn(which, number))


PROMISES = (
    Promise(name="no-side-effects", what="recording changes nothing that was there before", run=no_side_effects),
    Promise(name="writes-once", what="a replay writes state once, through views too", run=writes_once),
    Promise(name="random-state", what="recording moves no random generator on", run=random_state_stays),
    Promise(name="random-numbers", what="what draws random numbers is refused or draws anew", run=random_numbers),
    Promise(name="two-programs", what="programs of one device do not disturb each other", run=two_programs),
)
