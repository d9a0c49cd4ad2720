"""Products of fp8 codes by cuBLAS and CUTLASS, which torch brings as `torch._scaled_mm`, for any number of rows."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.workspace import one

ALIGNED = 16
"""The sizes of the weight must be multiples of this for `torch._scaled_mm`."""

WAYS = ("rowwise", "tensor")
"""rowwise: one kernel that scales rows and columns. tensor: one that knows a single scale, and the scales after it by a
kernel of this plugin. The second is the faster one for few rows, though it writes its result twice."""

_BLOCK = 1024


@triton.jit
def _scale_kernel(
    raw, x_scale, w_scale, bias, out, N, x_step, w_step, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out (M, N) = raw (M, N) * x_scale (M,) * w_scale (N,) + bias (N,)."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    # After the wait: a graph may compute the weight's scale, and a bias with gaps has just been copied.
    factor = tl.load(w_scale + column * w_step, mask=inside, other=0.0)
    added = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    value = tl.load(raw + row * N + column, mask=inside, other=0.0)
    value = value * tl.load(x_scale + row * x_step) * factor + added
    tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=inside)


def scaled_linear(
    x: Tensor,
    weight: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    way: str,
    *,
    fast: bool = False,
) -> Tensor:
    """Return `x @ weight.T * scales + bias` (M, N) of fp8 codes x (M, K) and weight (N, K), both contiguous.

    scales: of x (M,) and of weight (N,), or of one element where one serves all, fp32. K and N are multiples of
    `ALIGNED`. way: one of `WAYS`; "rowwise" gives bfloat16 only. Sums in fp32; fast: in the narrower way of the matrix
    units (`use_fast_accum`), which makes results wrong by 1.3 to 2 times as much as rounding to bfloat16 alone does
    (K = 4,096 to 14,336, measured on an H100).
    """
    num_rows, columns = x.shape[0], weight.shape[0]
    x_scale, w_scale = scales
    how: dict[str, Any] = {"use_fast_accum": fast}
    if x_scale.numel() == 1 and w_scale.numel() == 1 and bias is None:
        how |= {"scale_a": x_scale.view(()), "scale_b": w_scale.view(())}
        return torch._scaled_mm(x, weight.t(), **how, out_dtype=out_dtype)
    if way == "rowwise":
        how |= {"scale_a": x_scale.view(-1, 1).expand(num_rows, 1).contiguous()}
        how |= {"scale_b": w_scale.view(1, -1).expand(1, columns).contiguous()}
        return torch._scaled_mm(x, weight.t(), **how, bias=bias, out_dtype=out_dtype)
    unit = one(x.device)
    raw = torch._scaled_mm(x, weight.t(), **how, scale_a=unit, scale_b=unit, out_dtype=torch.float32)
    out = torch.empty((num_rows, columns), dtype=out_dtype, device=x.device)
    launching.launch(
        _scale_kernel,
        (num_rows, triton.cdiv(columns, _BLOCK)),
        *(raw, x_scale, w_scale, out if bias is None else bias.contiguous(), out),
        *(columns, int(x_scale.numel() > 1), int(w_scale.numel() > 1)),
        HAS_BIAS=bias is not None,
        BLOCK=_BLOCK,
    )
    return out
