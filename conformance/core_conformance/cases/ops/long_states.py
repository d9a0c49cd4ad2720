"""Area "ops": states of recurrent layers over thousands of steps, where small errors of each could add up.

A state that is kept in a narrower dtype, decays by a rounded factor, or is taken from the step before last, passes the
judgement of a single call: what is kept is wrong by little, and shows after many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.ops.arguments import Draw
from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpImplementation
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE
from core.device import Device
from core_conformance.case import COMPILED_TIMEOUT_S, Case
from core_conformance.cases.ops.collect import candidates, slug
from core_conformance.dtypes import dtype_name, working_dtype
from core_conformance.inputs.large_recurrent import conv_call, delta_call, space_call
from core_conformance.inputs.opcalls import positional, refusal
from core_conformance.rules import oracle
from core_conformance.trial import NotSupported, Trial

NUM_STEPS = 4096
_JUDGED = 32
"""Last steps whose results are judged, together."""
_ROWS = 3
_TOKENS = 64
"""Different tokens, which come again and again, each time behind others."""
CALLS: Mapping[str, Callable[[Draw], dict[str, Any]]] = {
    CAUSAL_CONV1D_UPDATE.name: lambda draw: conv_call(draw, _ROWS, 64),
    # Slow decay, as trained models have in some heads: a state remembers hundreds of steps.
    GATED_DELTA_RULE.name: lambda draw: _slow(delta_call(draw, _ROWS, (1, 2), (32, 32)), "decay", 1e-3),
    SELECTIVE_STATE_UPDATE.name: lambda draw: _slow(space_call(draw, _ROWS, (2, 1), (32, 32)), "A", 1e-3),
}
_PER_TOKEN = ("x", "query", "key", "value", "decay", "beta", "dt", "B", "C")


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Return the cases of this module for a device."""
    for op in (CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE):
        dtype = working_dtype(device)
        for name, candidate in {"reference": None, **candidates(op, device)}.items():
            yield Case(
                id=f"ops/{op.name}/{slug(name)}/{NUM_STEPS}-steps",
                what=f"core::{op.name}: {name}, {NUM_STEPS} steps in a row on one state, in {dtype_name(dtype)}",
                run=partial(_many_steps, op=op, of=candidate, dtype=dtype),
                timeout_s=COMPILED_TIMEOUT_S,
            )


def _slow(call: dict[str, Any], name: str, factor: float) -> dict[str, Any]:
    return {**call, name: call[name] * factor}


def _many_steps(trial: Trial, *, op: CanonicalOp, of: OpImplementation | None, dtype: torch.dtype) -> None:
    """Judge the last results and the state by T1, against the reference on the device and in fp64."""
    if of is not None and of.missing:
        raise NotSupported(of.missing)
    call = CALLS[op.name](Draw(dtype, trial.device.torch_device, seed=trial.seed))
    reason = None if of is None else refusal(op, of.condition, call)
    if reason is not None:
        raise NotSupported(reason)
    call["states"] = torch.zeros_like(call["states"])
    call["slots"] = call["kept"].clone()  # the state that the step before has kept
    shared = oracle.own(call)
    if of is None:
        mine, theirs = _results(op, op.reference, call), _results(op, op.reference, oracle.on_host(shared))
    else:
        mine, theirs = _results(op, of.fn, call), _results(op, op.reference, oracle.own(shared))
    true = _exact(op, shared)
    for what, result, eager, exact in zip(("the last results", "the states"), mine, theirs, true, strict=True):
        trial.judge(f"{what} of {NUM_STEPS} steps", result.cpu(), eager.cpu(), exact)


def _results(op: CanonicalOp, function: Callable[..., Any], call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the results of the last steps, and the states after them."""
    last: list[Tensor] = []
    tokens = _tokens(call)
    for step in range(NUM_STEPS):
        args, named = positional(op, {**call, **tokens[(step + step // _TOKENS) % _TOKENS]})
        with torch.no_grad():
            out = function(*args, **named)
        if step >= NUM_STEPS - _JUDGED:
            last.append(out)
    return torch.cat(last), call["states"]


def _exact(op: CanonicalOp, call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    def steps(**wide: Any) -> tuple[Tensor, Tensor]:
        return _results(op, op.reference, wide)

    return oracle.exact(steps, call)[0]  # type: ignore[no-any-return]  # what the function returns


def _tokens(call: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Return what differs between steps: each token's tensors, moved on by one place each time."""
    own = {name: call[name] for name in _PER_TOKEN if name in call and call[name].shape[0] == _ROWS}
    return [{name: value.roll((step % _ROWS, step), (0, -1)) for name, value in own.items()} for step in range(_TOKENS)]
