"""Area graphs: a tensor-parallel forward gives the results of one process that holds the whole model, in each mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from core.compilation.capture.inputs import InputSpec
from core.compilation.compile import compile
from core.compilation.options import CompileOptions
from core.compilation.program import Program
from core.device import Device, Mode
from core.engine.models.distributed import Processes
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
from core_conformance.cases.processes.part import Part
from core_conformance.dtypes import working_dtype
from core_conformance.rules import oracle
from core_conformance.trial import Trial

_PER_RANK = (2, 4)
_COUNTS = (4, 2, 2, 4, 4, 2, 2, 4, 4, 2, 2, 4)
"""Rows of each bucket and of each call, times the number of processes. No call is padded: after a scatter and a
gather, a trace can't tell which rows are padding."""
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


def parts(device: Device) -> Iterator[Part]:
    """Yield a part for each way to write collectives, in each mode."""
    for name, form in FORMS.items():
        for mode in form.modes:
            declared = mode in (*device.capabilities.modes, "off")
            yield Part(
                id=f"graphs/processes/{name}/{mode}",
                what=form.what,
                run=partial(shared_calls, form=form, mode=mode),
                not_supported="" if declared else f"the device does not declare mode {mode!r}",
            )


def shared_calls(trial: Trial, place: Processes, *, form: Form, mode: Mode) -> None:
    """Serve a sharded forward on changing inputs. Judge each call against the unsharded forward."""
    device, dtype = trial.device, working_dtype(trial.device)
    whole = weights(trial.seed, torch.empty(0, dtype=dtype, device=device.torch_device), place.size)
    shard = Shard(whole, form.moves(), place.rank, place.size)
    with _program(device, form, mode, shard, place.size) as program:
        num_runs = 0
        for number, per_rank in enumerate(_COUNTS):
            count = per_rank * place.size
            numbers = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(trial.seed + number))
            x = numbers.to(whole["up"])
            with _runs_of(Shard.forward) as runs:
                result = program(x=x)
            num_runs += len(runs)
            _judge_call(trial, f"call {number}, {count} rows", result, whole, x)
        if mode in GRAPHS:
            trial.require(num_runs == 0, f"{len(_COUNTS)} replays ran the captured Python {num_runs} times")
        _account(trial, program, mode)


def _program(device: Device, form: Form, mode: Mode, shard: Shard, size: int) -> Program:
    buckets = [rows * size for rows in _PER_RANK]
    inputs = {"x": InputSpec(("n", WIDTH), working_dtype(device))}
    if not form.lowered:
        return make(device, mode, shard, inputs, buckets=buckets)
    options = CompileOptions(mode=mode, break_at=BREAK if mode == "piecewise" else None)
    return compile(shard, device, inputs=inputs, buckets=buckets, options=options)


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


def _account(trial: Trial, program: Program, mode: Mode) -> None:
    """Require that this process ran in the mode asked for. All processes check this."""
    report = program.report()
    trial.same("the mode", dict(report.modes), {"main": mode})
    if mode != "off":
        trial.same("replays", sum(report.replays.values()), len(_COUNTS))
        trial.same("calls without a graph", dict(report.fallbacks), {})
