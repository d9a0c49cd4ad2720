"""`core::rms_norm` by FlashInfer's kernel.

Its `fused_add_rmsnorm` is no implementation of `core::add_rms_norm`: it normalises the sum before that is rounded, and
overwrites both of its inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.norm.norms import RMS_NORM
from core_cuda.flashinfer import presence
from core_cuda.flashinfer.building import HALF, NORM, not_ahead
from core_cuda.ops import launching
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rows import outputs

_WIDE = (None, torch.float32)


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a call of `core::rms_norm`, or None."""
    args = call.args
    x, weight = args["x"], args["weight"]
    if x.dtype not in HALF:
        return f"x is {x.dtype}, and the kernel takes {', '.join(map(str, HALF))}"
    if weight is None:
        return "it has no weight, and the kernel takes one"
    if weight.dtype != x.dtype:
        return f"weight is {weight.dtype} and x {x.dtype}, and the kernel takes one dtype"
    if args["compute_dtype"] not in _WIDE or args["normed_dtype"] not in _WIDE:
        return "it rounds before the weight, and the kernel computes in torch.float32 up to the end"
    if args["out_dtype"] not in (None, x.dtype):
        return f"the result is {args['out_dtype']}, and the kernel gives {x.dtype}"
    if args["offset"] not in (0.0, 1.0):
        return f"its weight is offset by {args['offset']}, and the kernel adds 0 or 1"
    if args["weight_dtype"] not in ((torch.float32,) if args["offset"] else (None, weight.dtype, torch.float32)):
        return (
            f"the weight is rounded to {args['weight_dtype'] or weight.dtype}, and the kernel computes in torch.float32"
        )
    return None


def timed(call: OpCall) -> str | None:
    """Return why the kernel is not worth timing at the sizes of a call, or None."""
    return not_ahead(NORM)


@kernel_of(RMS_NORM, "flashinfer")
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, **args: Any) -> Tensor:
    """Return what `core::rms_norm` returns, for calls that `why_not` lets pass."""
    (out,) = outputs(RMS_NORM, {"x": x, "weight": weight, "eps": eps, "offset": offset, **args}, x.device)
    if not x.numel():
        return out
    library = presence.load()
    normed = library.gemma_rmsnorm if offset else library.rmsnorm
    rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
    made = out.view(-1, width) if out.is_contiguous() else torch.empty_like(rows, memory_format=torch.contiguous_format)
    normed(rows.contiguous(), weight.contiguous(), eps, out=made, enable_pdl=launching.may_overlap())
    return out if out.is_contiguous() else out.copy_(made.view(x.shape))
