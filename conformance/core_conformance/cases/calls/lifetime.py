"""Promises of programs: failing captures, closing, serving and threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.compilation.program import Program
from core.device import Device, Mode
from core.errors import CaptureError, CoreError, TraceError
from core_conformance.cases.calls.programs import ARMED, BUCKETS, doubled, fragile, make, rows
from core_conformance.cases.graphs.promises import IN_PARTS, Promise
from core_conformance.cases.graphs.threads import in_threads
from core_conformance.trial import Trial, raised

ROUNDS = 4


def _scaled(device: Device, mode: Mode, by: float, **options: Any) -> Program:
    options = {"buckets": BUCKETS} | options
    return make(device, mode, lambda x: doubled(x + 1) * by, **options)


def _serves(trial: Trial, program: Program, by: float, when: str, counts: tuple[int, ...] = (3, 8, 2, 5)) -> None:
    for count in counts:
        x = rows(program.device, count, count)
        trial.same(f"{count} rows {when}", program(x=x), (x + 1) * 2 * by)


def _with_notes(error: CoreError) -> str:
    """Return the text of an error and of its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def failing_capture(trial: Trial, mode: Mode) -> None:
    """Let an op raise in the middle of a capture; the error names the key, and the device works on."""
    device = trial.device
    kept = _scaled(device, mode, 2.0)

    def function(x: Tensor) -> Tensor:
        return fragile(doubled(x) + 1)

    def arm() -> None:
        ARMED.armed = True

    # Without a recording only the warm-up runs.
    ARMED.armed = mode == "compile"
    try:
        make(device, mode, function, buckets=BUCKETS, reset=arm)
    except CoreError as error:
        text = _with_notes(error)
        trial.require(f"main[{BUCKETS[-1]}]" in text, f"the error does not name the key: {text}")
        trial.require("planted in the capture" in text, f"the error does not name the cause: {text}")
    else:
        trial.fail("an op raised in the capture, and compiling did not")
    finally:
        ARMED.armed = False
    x = rows(device, 5, 1)
    trial.same(
        "torch on the device after a failed capture", float((x + 1).sum()), float(x.cpu().float().sum() + x.numel())
    )
    _serves(trial, kept, 2.0, "of a program that was there before")
    with make(device, mode, function, buckets=BUCKETS) as program:
        trial.same("the same function, captured again", program(x=x), (x * 2 + 1) * 2)
    kept.close()


def reading(trial: Trial, mode: Mode) -> None:
    """Compile a function that reads a sum on the host: refused by name, or its results follow the inputs."""
    device = trial.device

    def function(x: Tensor) -> Tensor:
        return doubled(x) * (x.sum().item() + 1)

    try:
        program = make(device, mode, function, buckets=[8], eager=())
    except CoreError as error:
        named = isinstance(error, TraceError) or "main[8]" in _with_notes(error)
        trial.require(named, f"the error does not name the key: {_with_notes(error)}")
        trial.note(f"refused: {type(error).__name__}")
    else:
        with program:
            for number in range(ROUNDS):
                x = rows(device, 8, 80 + number)
                trial.same(f"call {number}, with a sum read on the host", program(x=x), function(x))
    with _scaled(device, mode, 2.0, buckets=[4, 8]) as program:
        _serves(trial, program, 2.0, "after a host read in a capture")


def closing(trial: Trial, mode: Mode) -> None:
    """Close one of two programs, twice; the other one lives, and a new one takes its place."""
    device = trial.device
    first, second = _scaled(device, mode, 2.0), _scaled(device, mode, 3.0)
    for count in (3, 8, 1):
        _serves(trial, first, 2.0, "of the first program", (count,))
        _serves(trial, second, 3.0, "of the second program", (count,))
    x = rows(device, 8, 1)
    held = first(x=x)
    second.close()
    second.close()
    trial.same("a result held while another program was closed", held, (x + 1) * 4)
    for name, use in (
        ("a call", lambda: second(x=x)),
        ("a replay", lambda: second.replay(first.keys[0])),
        ("the buffers", lambda: second.inputs(first.keys[0])),
    ):
        trial.require(bool(raised(CaptureError, use)), f"{name} of a closed program does not raise CaptureError")
    _serves(trial, first, 2.0, "while the other program is closed")
    with _scaled(device, mode, 5.0) as third:
        _serves(trial, third, 5.0, "of a program captured after a close")
        _serves(trial, first, 2.0, "beside a program captured after a close")
    first.close()


def serving(trial: Trial, mode: Mode) -> None:
    """Serve every size that has a graph: nothing is compiled, traced or run without a graph."""
    with _scaled(trial.device, mode, 2.0, strict=True) as program:
        with program.serving():
            for _ in range(2):
                _serves(trial, program, 2.0, "while serving", (1, 8, 3, 4, 7, 2))
        report = program.report()
        trial.same("compiles while serving", dict(report.compiles), {})
        trial.same("calls without a graph", dict(report.fallbacks), {})
        trial.same("replays", sum(report.replays.values()), 12)
        trial.same("the mode", dict(report.modes), {"main": mode})


def breaks(trial: Trial, mode: Mode) -> None:
    """Look at the parts of a program: a graph, an eager call, and so on; each reads what came before in this call."""
    device = trial.device

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = doubled(x + 1)
        z = doubled(y - x)
        return z * 2 + y, x * 3

    with make(device, mode, function, buckets=BUCKETS) as program:
        for bucket in program.report().buckets:
            found = bucket.num_graphs, len(bucket.eager)
            trial.same(f"graphs and eager calls of {bucket.key}", found, (3, 2))
        for number, count in enumerate((8, 3, 2, 8)):
            x = rows(device, count, 30 + number)
            y = (x + 1) * 2
            for index, (out, wanted) in enumerate(zip(program(x=x), ((y - x) * 4 + y, x * 3), strict=True)):
                trial.same(f"call {number}, output {index}", out, wanted)


def threads(trial: Trial, mode: Mode) -> None:
    """Serve programs of equal keys in threads of their own, while another thread makes and closes more."""
    device, found = trial.device, list[str]()

    def right(program: Program, by: float, x: Tensor) -> None:
        if not torch.equal(program(x=x), (x + 1) * 2 * by):
            found.append(f"the program that multiplies by {by} gave wrong values for {len(x)} rows")

    def serve(program: Program, by: float) -> None:
        with program.serving():
            for number in range(20):
                right(program, by, rows(device, 1 + number % 8, number))

    def prepare() -> None:
        for number in range(2):
            with _scaled(device, mode, 7.0 + number, buckets=[8]) as program:
                right(program, 7.0 + number, rows(device, 8, number))

    programs = [(_scaled(device, mode, by), by) for by in (2.0, 3.0)]
    tasks: list[Callable[[], None]] = [partial(serve, *each) for each in programs]
    # torch traces in one thread at a time.
    in_threads(trial, *tasks, *([] if mode == "piecewise" else [prepare]))
    trial.fail(*found[:3])
    for program, by in programs:
        _serves(trial, program, by, "after the threads")
        trial.same("calls without a graph", dict(program.report().fallbacks), {})
        program.close()


PROMISES = (
    Promise(name="failing-capture", what="an op that raises in a capture: the key is named", run=failing_capture),
    Promise(name="reading", what="a host read in a compiled function is refused, or followed", run=reading),
    Promise(name="closing", what="closing a program leaves others alone, and refuses its use", run=closing),
    Promise(name="serving", what="serving captured sizes compiles nothing", run=serving),
    Promise(
        name="breaks",
        what="graphs and eager calls of a program run in order, on values of this call",
        run=breaks,
        scope=IN_PARTS,
    ),
    Promise(name="threads", what="programs serve in threads while others are made and closed", run=threads),
)
