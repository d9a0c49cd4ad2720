"""The steps of recurrent layers by the extension's kernels: each state is read and written once, in its slot.

torch's own code gathers the states of a step, computes new ones, and scatters them: six passes over memory for two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE
from core_cpu import extension
from core_cpu.own_ops import own_op

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SOURCE = "recurrent"


def convolution_why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::causal_conv1d_update`, or None; builds the extension for one.

    call: as it stands in the graph; so for the others.
    """
    x, weight = call.args["x"], call.args["weight"]
    if weight.dtype not in (x.dtype, torch.float32):
        return f"weight is {weight.dtype}, and the kernel takes {x.dtype} and torch.float32"
    return _why_not(call, "x") or extension.load(_SOURCE) or None


def delta_rule_why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::gated_delta_rule`, or None; builds the extension for one."""
    decay = call.args["decay"]
    if decay.dim() == 3 and decay.dtype != torch.float32:
        return f"decay by feature is {decay.dtype}, and the kernel takes torch.float32"
    return (
        _why_not(call, "value", "query", "key", "decay", "beta")
        or _narrow_states(call)
        or extension.load(_SOURCE)
        or None
    )


def state_space_why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::selective_state_update`, or None; builds the extension for
    one."""
    return (
        _why_not(call, "x", "B", "C", "dt", "A", "D", "dt_bias")
        or _narrow_states(call)
        or extension.load(_SOURCE)
        or None
    )


def _why_not(call: OpCall, first: str, *others: str) -> str | None:
    """Return why dtypes or states do not fit. first: the argument whose dtype the results have."""
    dtype = call.args[first].dtype
    for name in (first, *others):
        given = call.args[name]
        if given is not None and given.dtype not in _DTYPES:
            return f"{name} is {given.dtype}, and the kernel takes {', '.join(map(str, _DTYPES))}"
        if name in ("query", "key", "B", "C") and given.dtype != dtype:
            return f"{name} is {given.dtype} and {first} {dtype}, and the kernel takes one dtype"
    return None if all(_is_run(call.args["states"])) else "a state is not one run of memory"


def _is_run(states: Tensor) -> Iterator[bool]:
    """Yield for each dimension of a state, the last first, whether it lies in one run of memory with those after."""
    expected = 1
    for size, stride in zip(reversed(states.shape[1:]), reversed(states.stride()[1:]), strict=True):
        yield stride == expected or size == 1
        expected *= size


def _narrow_states(call: OpCall) -> str | None:
    dtype = call.args["states"].dtype
    return None if dtype == torch.float32 else f"states are {dtype}, and the kernel takes torch.float32"


causal_conv1d_update = own_op(CAUSAL_CONV1D_UPDATE, _SOURCE)
gated_delta_rule = own_op(GATED_DELTA_RULE, _SOURCE)
selective_state_update = own_op(SELECTIVE_STATE_UPDATE, _SOURCE)

IMPLEMENTATIONS = (
    OpImplementation(
        op=CAUSAL_CONV1D_UPDATE.qualified_name,
        name="cpu_causal_conv1d_update",
        fn=causal_conv1d_update,
        condition=convolution_why_not,
    ),
    OpImplementation(
        op=GATED_DELTA_RULE.qualified_name,
        name="cpu_gated_delta_rule",
        fn=gated_delta_rule,
        condition=delta_rule_why_not,
    ),
    OpImplementation(
        op=SELECTIVE_STATE_UPDATE.qualified_name,
        name="cpu_selective_state_update",
        fn=selective_state_update,
        condition=state_space_why_not,
    ),
)
