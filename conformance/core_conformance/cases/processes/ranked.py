"""The suite that each process of a distributed case runs: collect.py starts the processes, this module judges inside.

The environment variables of torchrun (set by pair.py) give a process its rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, distributed

from core.common.conformance import ConformanceProfile
from core.compilation.capture.inputs import InputSpec
from core.compilation.compile import compile
from core.compilation.options import CompileOptions
from core.compilation.program import Program
from core.device import Device, Mode
from core.engine.models.distributed import Processes, initialize
from core_conformance.case import Case
from core_conformance.cases.calls.programs import BREAK, make
from core_conformance.cases.graphs.promises import GRAPHS
from core_conformance.cases.processes.models import (
    ALONE,
    WIDTH,
    Moves,
    Shard,
    canonical,
    forward,
    of_graphs,
    of_torch,
    weights,
)
from core_conformance.dtypes import working_dtype
from core_conformance.rules import oracle
from core_conformance.trial import Trial

CASES = ()
"""This module has no cases of level 0."""

GROUP_TIMEOUT_S = 80.0
"""How long a collective waits for the other process. A third of a case's time-out: the waiting process still reports in
time, so only the process that hangs gives no answer."""
CASE_TIMEOUT_S = 240.0

BUCKETS = [4, 8]
_COUNTS = (8, 4, 4, 8, 8, 4, 4, 8, 8, 4, 4, 8)
"""Rows of each call. No call is padded: after a scatter and a gather, a trace can't tell which rows are padding."""
_TRACED: tuple[Mode, ...] = ("full", "piecewise", "compile")


class Form(NamedTuple):
    """One way to write a forward's collectives."""

    what: str
    moves: Callable[[], Moves]
    #: Whether the device's own lowering and passes compile the forward.
    lowered: bool = False
    modes: tuple[Mode, ...] = get_args(Mode)


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "canonical": Form("core's collectives", canonical),
        "functional": Form("torch's functional collectives", of_graphs),
        "lowered": Form("collectives through the device's lowering and passes", of_torch, lowered=True, modes=_TRACED),
    }
)


def case_id(form: str, mode: Mode) -> str:
    """Return the id of a case, for the parent process and for the processes that it starts."""
    return f"graphs/processes/{form}/{mode}"


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield this process's share of each case."""
    for name, form in FORMS.items():
        for mode in form.modes:
            run = partial(shared_calls, form=form, mode=mode)
            yield Case(id=case_id(name, mode), what=form.what, run=run, timeout_s=CASE_TIMEOUT_S)


def shared_calls(trial: Trial, *, form: Form, mode: Mode) -> None:
    """Serve a sharded forward on changing inputs. Judge each call against the unsharded forward."""
    device, dtype = trial.device, working_dtype(trial.device)
    backend = distributed.get_default_backend_for_device(device.torch_device)
    place = initialize(backend, timeout_s=GROUP_TIMEOUT_S * trial.timeout_factor)
    whole = weights(trial.seed, torch.empty(0, dtype=dtype, device=device.torch_device))
    shard = Shard(whole, form.moves(), place.rank, place.size)
    with _program(device, form, mode, shard) as program:
        num_runs = 0
        for number, count in enumerate(_COUNTS):
            numbers = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(trial.seed + number))
            x = numbers.to(whole["up"])
            with _runs_of(Shard.forward) as runs:
                result = program(x=x)
            num_runs += len(runs)
            _judge_call(trial, f"call {number}, {count} rows", result, whole, x)
        if mode in GRAPHS:
            trial.require(num_runs == 0, f"{len(_COUNTS)} replays ran the captured Python {num_runs} times")
        _account(trial, program, mode, place)


def _program(device: Device, form: Form, mode: Mode, shard: Shard) -> Program:
    inputs = {"x": InputSpec(("n", WIDTH), working_dtype(device))}
    if not form.lowered:
        return make(device, mode, shard, inputs, buckets=BUCKETS)
    options = CompileOptions(mode=mode, break_at=BREAK if mode == "piecewise" else None)
    return compile(shard, device, inputs=inputs, buckets=BUCKETS, options=options)


@contextmanager
def _runs_of(function: Callable[..., Any]) -> Iterator[list[Any]]:
    """Yield a list that gets an entry for each call of a function on this thread: a counter inside the function would
    be Python state, which a capture refuses."""
    code, found = function.__code__, []

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code:
            found.append(event)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _judge_call(trial: Trial, name: str, result: Mapping[str, Tensor], whole: Mapping[str, Tensor], x: Tensor) -> None:
    eager = forward(x, whole, ALONE)
    exact, _ = oracle.exact(lambda x, **held: forward(x, held, ALONE), {"x": x, **whole})
    for key, value in eager.items():
        trial.judge(f"{name}, {key}", result[key], value, exact[key])


def _account(trial: Trial, program: Program, mode: Mode, place: Processes) -> None:
    """Require that this process ran in the mode asked for. Both processes check this."""
    report = program.report()
    trial.same("the number of processes", place.size, 2)
    trial.same("the mode", dict(report.modes), {"main": mode})
    if mode != "off":
        trial.same("replays", sum(report.replays.values()), len(_COUNTS))
        trial.same("calls without a graph", dict(report.fallbacks), {})
