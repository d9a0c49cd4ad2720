"""The squared ReLU of an MLP without a gate (Nemotron, Nemotron-H, Arcee): one launch that reads and writes once."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.layout import layouts_of
from core.common.ops.mlp.activation import ACTIVATIONS
from core_cuda.ops import launching
from core_cuda.ops.activation import activate, default_config
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.registration import own_kernel
from core_cuda.ops.rows import as_rows, row_starts

_squared = ACTIVATIONS["relu2"]


def why_not(x: Tensor) -> str | None:
    """Return why the kernel can't take a tensor, or None."""
    if x.dtype not in DTYPES:
        return f"it is {x.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    if not x.dim():
        return "it is a single number, and the kernel takes rows"
    if type(x.shape[-1]) is not int or not x.shape[-1]:
        return f"rows have {x.shape[-1]} elements, and the kernel takes one or more, in a number that does not vary"
    return None


# The fake is torch's own: strides follow x as those of its elementwise ops do.
@own_kernel("squared_relu(Tensor x) -> Tensor", _squared, _squared)
def squared_relu(x: Tensor) -> Tensor:
    """Return square(relu(x)), every bit as torch gives it: x (..., D), of any strides; fp32, bf16 or fp16.

    For calls that `why_not` lets pass.
    """
    ((shape, strides, dtype),) = layouts_of(_squared, (x,), {})
    out = torch.empty_strided(shape, strides, dtype=dtype, device=x.device)
    rows, width = as_rows({"x": x}, {"out": out}), x.shape[-1]
    config = default_config(rows.count, width)
    launching.launch(
        squared_relu_kernel,
        (rows.count * triton.cdiv(width, config.block),),
        **rows.arguments,
        WIDTH=width,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )
    rows.flush()
    return out


@triton.jit
def squared_relu_kernel(
    x, out, num_rows, inner, x_outer, x_inner, out_outer, out_inner, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FLAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row of WIDTH. The ReLU is exact, so only the square is rounded."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x_row = x + row_starts(row, inner, x_outer, x_inner, FLAT)
    out_row = out + row_starts(row, inner, out_outer, out_inner, FLAT)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    values = tl.load(x_row + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_row + columns, activate(values, "relu2", x.dtype.element_ty), mask=mask)
