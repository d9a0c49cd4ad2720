"""Area graphs, whole programs: calls of programs by `core.compile` and `core.capture`; cases/graphs tests the
backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.common.conformance import ConformanceProfile
from core.compilation.capture.inputs import InputSpec
from core.compilation.compile import compile
from core.compilation.options import CompileOptions
from core.compilation.program import Program
from core.device import Device, Mode
from core_conformance.case import Case
from core_conformance.cases.calls import buckets, host_arguments, lifetime
from core_conformance.cases.calls.programs import BREAK, BUCKETS, WIDTH, doubled, lowering_of, make
from core_conformance.cases.graphs.promises import Promise, Scope, cases_of
from core_conformance.dtypes import DTYPES, working_dtype
from core_conformance.rules import oracle
from core_conformance.trial import Trial, tensors


class Layer(nn.Module):
    """A norm, a gated projection and a break point in it, with a residual; rows stay apart."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH, generator=generator) / sqrt(WIDTH), requires_grad=False)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, generator=generator) / sqrt(WIDTH), requires_grad=False)
        self.norm = nn.Parameter(torch.linspace(0.4, 1.6, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows [n, W] for rows [n, W]."""
        wide = x.float()
        normed = self.norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        gate, up = functional.linear(normed, self.up).chunk(2, -1)
        return x + functional.linear(doubled(functional.silu(gate)) * up, self.down)


class Model(nn.Module):
    """Two layers; returns a mapping of rows, the largest entry of each, and which are positive."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(seed + number) for number in range(2))

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Return rows [n, W], int64 [n] and bool [n, W]."""
        for layer in self.layers:
            x = layer(x)
        return {"rows": x, "signs": (x > 0, None), "largest": x.argmax(-1)}


def _model(trial: Trial, dtype: torch.dtype) -> Model:
    return Model(trial.seed).to(trial.device.torch_device, dtype).eval()


def _rows(trial: Trial, count: int, seed: int, dtype: torch.dtype) -> Tensor:
    numbers = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return numbers.to(trial.device.torch_device, dtype)


def _serve(trial: Trial, program: Program, model: Model, dtype: torch.dtype, *, bitwise: bool) -> None:
    """Call with every size; bitwise: sizes of a bucket run the very kernels that the model runs uncaptured."""
    for number, count in enumerate((8, 5, 4, 2, 7, 8)):
        x = _rows(trial, count, trial.seed + number, dtype)
        _compare(trial, f"call {number}", program, model, x, bitwise=bitwise and count in BUCKETS)


def _compare(trial: Trial, what: str, program: Program, model: Model, x: Tensor, *, bitwise: bool) -> None:
    eager, result = model(x), program(x=x)
    trial.same(f"{what}: the keys of the result", list(result), list(eager))
    exact: Any = None
    for index, (ours, theirs) in enumerate(zip(tensors(result), tensors(eager), strict=True)):
        name = f"{what}, {len(x)} rows, output {index}"
        if bitwise:
            trial.same(name, ours, theirs)
        elif theirs.is_floating_point():
            state = {"x": x, **dict(model.named_parameters())}
            exact = exact if exact is not None else tensors(oracle.exact(_functional(model), state)[0])
            trial.judge(name, ours, theirs, exact[index])
        else:  # rounding may flip a comparison if kernels differ
            trial.same(f"{name}: its shape", tuple(ours.shape), tuple(theirs.shape))


def _functional(model: Model) -> Any:
    def run(x: Tensor, **parameters: Tensor) -> Any:
        return torch.func.functional_call(model, parameters, (x,))

    return run


def values(trial: Trial, mode: Mode, dtype: torch.dtype) -> None:
    """Serve a model in every size of row count, on the lowering that runs the graph as torch does."""
    model, lowering = _model(trial, dtype), lowering_of(trial.device)
    inputs = {"x": InputSpec(("n", WIDTH), dtype)}
    ops = trial.profile.nondeterministic_ops
    with make(trial.device, mode, model, inputs, buckets=BUCKETS, eager=None) as program:
        bitwise = (lowering == "inline" or mode != "piecewise") and not ops and trial.device.capabilities.deterministic
        _serve(trial, program, model, dtype, bitwise=bitwise)
        _account(trial, program, mode, len(BUCKETS))


def weights(trial: Trial, mode: Mode) -> None:
    """Write into a model's parameters in place, and load a state into them: calls go on with these."""
    dtype = working_dtype(trial.device)
    model, other = _model(trial, dtype), Model(trial.seed + 7)
    inputs = {"x": InputSpec(("n", WIDTH), dtype)}
    with make(trial.device, mode, model, inputs, buckets=BUCKETS, eager=None) as program:
        for number, what in enumerate(("as they were", "scaled in place", "loaded", "scaled in place")):
            if what == "loaded":
                model.load_state_dict(other.state_dict())
            for parameter in model.parameters() if what == "scaled in place" else ():
                parameter.mul_(0.5)  # in every dtype without rounding
            for count in (8, 3):
                _compare(trial, f"weights {what}", program, model, _rows(trial, count, number, dtype), bitwise=False)


def traced(trial: Trial, mode: Mode) -> None:
    """Serve a model compiled as the device does it by itself: its lowering, its passes."""
    dtype = working_dtype(trial.device)
    model = _model(trial, dtype)
    inputs = {"x": InputSpec(("n", WIDTH), dtype)}
    options = CompileOptions(mode=mode, break_at=BREAK if mode == "piecewise" else None)
    with compile(model, trial.device, inputs=inputs, buckets=[4, 8], options=options) as program:
        trial.note(f"lowering {program.report().lowering}")
        _serve(trial, program, model, dtype, bitwise=False)
        _account(trial, program, mode, 2)


def _account(trial: Trial, program: Program, mode: Mode, num_buckets: int) -> None:
    report = program.report()
    trial.same("the mode", dict(report.modes), {"main": mode})
    trial.same("buckets captured", report.num_captures, num_buckets)
    trial.same("replays", sum(report.replays.values()), 6)
    trial.same("calls without a graph", dict(report.fallbacks), {})


PROMISES = (
    Promise(
        name="calls", what="calls equal the model: in bits at a bucket's size, else by T1", run=values, dtypes=DTYPES
    ),
    Promise(name="weights", what="a model's weights changed in place are used by the next call", run=weights),
    Promise(
        name="default-lowering",
        what="calls of a program with the device's own lowering and passes meet the criterion",
        run=traced,
        scope=Scope(("full", "piecewise", "compile"), "this mode takes no trace, so nothing is lowered"),
        timeout_s=300.0,
    ),
    *buckets.PROMISES,
    *lifetime.PROMISES,
)


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield the cases on programs."""
    yield from cases_of(PROMISES, device)
    for case in cases_of([host_arguments.UPDATES], device):
        no_updates = "" if device.capabilities.update else "the device declares update=False"
        yield replace(case, not_supported=case.not_supported or no_updates)
