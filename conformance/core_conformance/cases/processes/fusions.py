"""Area passes: what passes make of collectives in residual layers, on several processes and in each traced mode.

Legend: n rows, W width, I inner size; P processes, of which each holds 1/P of I.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.common.passes.collective.norm import FUSE_ALL_REDUCE_NORM
from core.compilation.capture.inputs import InputSpec
from core.compilation.compile import compile
from core.compilation.options import CompileOptions
from core.compilation.program import Program
from core.device import Device, Mode
from core.engine.models.distributed import Processes
from core.engine.parallel.agreement import agree
from core_conformance.cases.calls.programs import lowering_of
from core_conformance.cases.processes.models import ALONE, Moves, of_torch
from core_conformance.cases.processes.part import Part
from core_conformance.dtypes import working_dtype
from core_conformance.rules import oracle
from core_conformance.trial import Skip, Trial

WIDTH, INNER_OF_EACH, NUM_LAYERS = 64, 24, 3
_PER_RANK = (2, 4)
_CALLS = (4, 2, 2, 4)
"""Rows of each bucket and of each call, times P, which then divides them: tokens are what is split."""
_MODES: tuple[Mode, ...] = ("full", "piecewise", "compile")


class Passes(NamedTuple):
    """Which passes over collectives run, and how often each has to match."""

    what: str
    enabled: tuple[str, ...]
    disabled: tuple[str, ...]
    owed: Mapping[str, int]


_ALL = ("fuse_all_reduce_norm", "sequence_parallel", "async_tensor_parallel")
CHOICES: Mapping[str, Passes] = MappingProxyType(
    {
        "none": Passes("collectives as they were written", (), _ALL, {}),
        "fused": Passes("sums with the norms after them", (), _ALL[1:], {_ALL[0]: NUM_LAYERS}),
        "split": Passes("tokens split between the norms", _ALL[1:2], _ALL[2:], {_ALL[1]: NUM_LAYERS}),
        "overlapped": Passes(
            "and gathered and scattered with the products",
            _ALL[1:2],
            (),
            {_ALL[1]: NUM_LAYERS, _ALL[2]: 2 * NUM_LAYERS - 1},
        ),
    }
)


def parts(device: Device) -> Iterator[Part]:
    """Yield a part for each choice of passes, in each mode that traces."""
    for name, passes in CHOICES.items():
        for mode in _MODES:
            declared = mode in device.capabilities.modes
            yield Part(
                id=f"passes/processes/{name}/{mode}",
                what=passes.what,
                run=partial(judge_passes, passes=passes, mode=mode),
                not_supported="" if declared else f"the device does not declare mode {mode!r}",
            )


def drawn(seed: int, like: Tensor, size: int) -> dict[str, Tensor]:
    """Return the whole weights of `size` processes, in the dtype and on the device of a tensor."""
    generator = torch.Generator().manual_seed(seed)
    inner = INNER_OF_EACH * size
    held = {}
    for layer in range(NUM_LAYERS):
        held[f"up{layer}"] = torch.randn(inner, WIDTH, generator=generator) / sqrt(WIDTH)
        held[f"down{layer}"] = torch.randn(WIDTH, inner, generator=generator) / sqrt(inner)
    for norm in range(NUM_LAYERS + 1):
        held[f"norm{norm}"] = 1 + 0.1 * torch.randn(WIDTH, generator=generator)
    return {name: weight.to(like) for name, weight in held.items()}


def forward(x: Tensor, held: Mapping[str, Tensor], moves: Moves) -> Tensor:
    """Return [n, W] of x [n, W]: layers that each add what a norm and two products make of it, and a last norm."""
    for layer in range(NUM_LAYERS):
        inner = functional.silu(functional.linear(_norm(x, held[f"norm{layer}"]), held[f"up{layer}"]))
        x = x + moves.reduce(functional.linear(inner, held[f"down{layer}"]))
    return _norm(x, held[f"norm{NUM_LAYERS}"]).sin()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Layers(nn.Module):
    """The layers of one process."""

    def __init__(self, whole: Mapping[str, Tensor], place: Processes, moves: Moves) -> None:
        super().__init__()
        for name, weight in whole.items():
            dim = {"up": 0, "down": 1}.get(name.rstrip("0123456789"))
            part = weight if dim is None else weight.chunk(place.size, dim)[place.rank].contiguous()
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        """Return what `forward` gives."""
        return forward(x, dict(self.named_parameters()), self.moves)


def judge_passes(trial: Trial, place: Processes, *, passes: Passes, mode: Mode) -> None:
    """Judge compiled layers against those of one process, and require the matches that they owe."""
    if passes.owed and f"most_bytes_of_{place.size}" not in FUSE_ALL_REDUCE_NORM.params:
        raise Skip(f"the passes over collectives have no limits for {place.size} processes, and rewrite nothing there")
    device = trial.device
    like = torch.empty(0, dtype=working_dtype(device), device=device.torch_device)
    whole = drawn(trial.seed, like, place.size)
    with _program(device, Layers(whole, place, of_torch()), passes, mode, place.size) as program:
        for number, per_rank in enumerate(_CALLS):
            generator = torch.Generator().manual_seed(trial.seed + number)
            x = torch.randn(per_rank * place.size, WIDTH, generator=generator).to(like)
            result, eager = program(x=x), forward(x, whole, ALONE)
            exact, _ = oracle.exact(lambda x, **held: forward(x, held, ALONE), {"x": x, **whole})
            trial.judge(f"call {number}, {len(x)} rows", result, eager, exact)
        _account(trial, program, passes, mode)


def _program(device: Device, layers: Layers, passes: Passes, mode: Mode, size: int) -> Program:
    # A device's own limits of these passes say where they pay, and rows are few here.
    without = tuple(each for each in device.passes if each.name not in _ALL)
    return compile(
        layers,
        replace(device, passes=without),
        inputs={"x": InputSpec(("n", WIDTH), working_dtype(device))},
        buckets=[rows * size for rows in _PER_RANK],
        options=CompileOptions(
            mode=mode,
            lowering=lowering_of(device),
            enable_passes=passes.enabled,
            disable_passes=passes.disabled,
        ),
    )


def _account(trial: Trial, program: Program, passes: Passes, mode: Mode) -> None:
    """Require the mode asked for, the matches owed, and that all ranks did the same."""
    report = program.report()
    trial.same("the mode", dict(report.modes), {"main": mode})
    for trace in report.traces:
        matched = {each.name: each.matched for each in trace.passes if each.name in _ALL and each.matched}
        trial.same("what the passes matched", matched, dict(passes.owed))

    def facts() -> dict[str, Any]:
        return {
            "order of passes": [[each.name for each in trace.passes] for trace in report.traces],
            "matches": [{each.name: each.matched for each in trace.passes} for trace in report.traces],
            "implementations": [[(one.op, one.implementation) for one in trace.ops] for trace in report.traces],
        }

    agree("what became of the graph", facts)
