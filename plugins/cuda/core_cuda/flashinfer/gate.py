"""`core::gated_activation_fused` by FlashInfer's kernels, one for each activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.mlp.activation import GATED_ACTIVATION_FUSED
from core_cuda.flashinfer import presence
from core_cuda.flashinfer.building import GATES, HALF, not_ahead
from core_cuda.ops import launching
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rows import outputs

_ALIGNED = 16
"""Bytes of which both halves of a row must be multiples."""


def why_not(call: OpCall) -> str | None:
    """Return why no kernel can take a call of `core::gated_activation_fused`, or None."""
    args = call.args
    x = args["gate_up"]
    if x.dtype not in HALF:
        return f"gate_up is {x.dtype}, and the kernel takes {', '.join(map(str, HALF))}"
    if args["kind"] not in GATES:
        return f"the activation is {args['kind']}, and there are kernels for {', '.join(GATES)}"
    if args["kind"] == "gelu_tanh" and x.dtype == torch.float16:
        return "in fp16 the kernel's tanh is too coarse where gelu_tanh is near zero"
    if not args["gate_first"] or args["interleaved"]:
        return "the gate is not the first half of a row, as the kernel has it"
    if args["limit"] or args["up_offset"]:
        return "it limits or shifts its values, which the kernel does not"
    if x.shape[-1] // 2 * x.element_size() % _ALIGNED:
        return f"rows have {x.shape[-1] // 2} features, and the kernel takes multiples of {_ALIGNED} bytes"
    return None


def timed(call: OpCall) -> str | None:
    """Return why the kernel is not worth timing at the sizes of a call, or None."""
    return not_ahead(f"{GATES[call.args['kind']]}_and_mul")


@kernel_of(GATED_ACTIVATION_FUSED, "flashinfer")
def gated_activation_fused(gate_up: Tensor, kind: str, **args: Any) -> Tensor:
    """Return what `core::gated_activation_fused` returns, for calls that `why_not` lets pass."""
    (out,) = outputs(GATED_ACTIVATION_FUSED, {"gate_up": gate_up, "kind": kind, **args}, gate_up.device)
    if not out.numel():
        return out
    gate = getattr(presence.load(), f"{GATES[kind]}_and_mul")
    rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
    made = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    gate(rows, out=made.view(-1, out.shape[-1]), enable_pdl=launching.may_overlap())
    return out if out.is_contiguous() else out.copy_(made)
