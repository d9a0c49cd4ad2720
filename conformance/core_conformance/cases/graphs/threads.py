"""Promises about threads: programs share nothing, so each thread may capture and replay its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.device import Device, Mode
from core_conformance.cases.graphs.drive import TOKENS, WIDTH, Captured, Subject, capture, whole
from core_conformance.cases.graphs.models import weighted, writer
from core_conformance.cases.graphs.promises import Promise
from core_conformance.trial import Trial

THREADS, REPLAYS = 2, 25
TIMEOUT_S = 60.0


def in_threads(trial: Trial, *tasks: Callable[[], None]) -> None:
    """Run the tasks at once, each in a thread, and report what they raise."""
    errors: list[str] = []
    start = threading.Barrier(len(tasks))

    def run(number: int, task: Callable[[], None]) -> None:
        try:
            start.wait(TIMEOUT_S)
            task()
        except Exception as error:
            errors.append(f"thread {number} raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(tasks)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # mistakes show when the interpreter switches threads often
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    finally:
        sys.setswitchinterval(interval)
    trial.fail(*errors)
    stuck = sum(thread.is_alive() for thread in threads)
    trial.require(not stuck, f"{stuck} of {len(threads)} threads have not ended after {TIMEOUT_S:.0f} s")


def _subjects(device: Device, number: int) -> tuple[Subject, Subject]:
    """Return two subjects for one thread, the second with state; values differ between threads."""
    state = writer(device)
    state.write(slots=torch.arange(TOKENS) + number)
    return weighted(device, float(10 * number)), state


def _serve(captured: Captured, number: int, found: list[str]) -> None:
    """Replay on changing inputs beside a twin, and note which replays differ."""
    twin = captured.subject.twin()
    for call in range(REPLAYS):
        x = whole((TOKENS, WIDTH), 100 * number + call, twin.tensors["x"])
        for subject in (captured.subject, twin):
            subject.write(x=x)
        # No synchronize: a device may not be waited for while another thread captures on it.
        outputs, wanted = captured.replay(), twin.run()
        pairs: list[tuple[Tensor, Tensor]] = [*zip(outputs, wanted, strict=True)]
        pairs += [(captured.subject.tensors[name], tensor) for name, tensor in twin.tensors.items()]
        wrong = [index for index, (ours, theirs) in enumerate(pairs) if not torch.equal(ours, theirs)]
        if wrong:
            found.append(f"thread {number}, replay {call}: values {wrong} are wrong")


def _servers(device: Device, mode: Mode, subjects: Sequence[Subject], found: list[str]) -> list[Callable[[], None]]:
    """Capture the subjects one after the other; return their captured programs."""
    programs = [capture(device, mode, subject) for subject in subjects]
    return [partial(_serve, captured, number, found) for number, captured in enumerate(programs)]


def replays_in_threads(trial: Trial, mode: Mode) -> None:
    """Replay programs that were captured one after the other, all at once, under equal keys."""
    found = list[str]()
    subjects = [subject for number in range(THREADS) for subject in _subjects(trial.device, number)]
    in_threads(trial, *_servers(trial.device, mode, subjects, found))
    _report(trial, found)


def capture_beside_replays(trial: Trial, mode: Mode) -> None:
    """Capture and drop programs in one thread, while others replay."""
    device, found = trial.device, list[str]()
    subjects = [_subjects(device, number)[1] for number in range(THREADS)]
    in_threads(
        trial, *_servers(device, mode, subjects, found), partial(_capture_and_drop, device, mode, THREADS, found)
    )
    _report(trial, found)


def captures_at_once(trial: Trial, mode: Mode) -> None:
    """Capture, replay and drop programs in several threads."""
    device, found = trial.device, list[str]()
    in_threads(trial, *(partial(_capture_and_drop, device, mode, number, found) for number in range(THREADS)))
    _report(trial, found)


def _capture_and_drop(device: Device, mode: Mode, number: int, found: list[str]) -> None:
    """Capture two programs one after the other, replay each, and drop it."""
    for again, subject in enumerate(_subjects(device, number)):
        captured = capture(device, mode, subject, GraphKey("decode", (8 + again,)))
        _serve(captured, number, found)
        captured.let_go()
        captured.backend.cleanup()


def _report(trial: Trial, found: Sequence[str]) -> None:
    trial.fail(*found[:3])
    trial.require(not found, f"{len(found)} replays of several threads gave wrong values")


PROMISES = (
    Promise(
        name="threads-replay", what="programs replay in several threads at once without mixing", run=replays_in_threads
    ),
    Promise(name="threads-capture", what="a thread captures while others replay", run=capture_beside_replays),
    Promise(name="threads-captures", what="several threads capture at once", run=captures_at_once),
)
