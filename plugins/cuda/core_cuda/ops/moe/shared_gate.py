"""A shared expert behind a gate of its own, added to the routed experts: a product and three ops in one launch."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from core_cuda.ops import launching
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.registration import own_kernel

MAX_WIDTH = 16384
"""The longest row that a program holds in registers."""


def why_not(x: Tensor, weight: Tensor, shared: Tensor, routed: Tensor) -> str | None:
    """Return why the kernel can't take these operands, or None."""
    kinds = {each.dtype for each in (x, weight, shared, routed)}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        found, taken = (", ".join(map(str, each)) for each in (sorted(kinds, key=str), DTYPES))
        return f"they are {found}, and the kernel takes one of {taken}"
    widths = x.shape[-1], shared.shape[-1]
    if any(type(each) is not int or not 0 < each <= MAX_WIDTH for each in widths):
        return f"rows have {widths[0]} and {widths[1]} elements, and the kernel takes {MAX_WIDTH} at most"
    return None


def _fake(x: Tensor, weight: Tensor, shared: Tensor, routed: Tensor) -> Tensor:
    return torch.empty_like(routed, memory_format=torch.contiguous_format)


def _reference(x: Tensor, weight: Tensor, shared: Tensor, routed: Tensor) -> Tensor:
    return (routed + torch.sigmoid(functional.linear(x, weight)) * shared).contiguous()


@own_kernel("add_gated_expert(Tensor x, Tensor weight, Tensor shared, Tensor routed) -> Tensor", _fake, _reference)
def add_gated_expert(x: Tensor, weight: Tensor, shared: Tensor, routed: Tensor) -> Tensor:
    """Return routed + sigmoid(x @ weight.T) * shared: x (T, K), weight (1, K), the others (T, D); contiguous.

    Rounded after each of the four, as the ops apart are; the product's sum is in fp32. For calls that `why_not` lets
    pass.
    """
    x, shared, routed = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, shared, routed))
    out = torch.empty(routed.shape, dtype=routed.dtype, device=routed.device)
    width, size = x.shape[1], shared.shape[1]
    blocks: dict[str, Any] = {"BLOCK_K": triton.next_power_of_2(width), "BLOCK": triton.next_power_of_2(size)}
    launching.launch(
        gated_expert_kernel, (x.shape[0],), x, weight.contiguous(), shared, routed, out,
        x.stride(0), shared.stride(0), routed.stride(0), WIDTH=width, SIZE=size, **blocks,
        num_warps=min(max(max(blocks.values()) // 256, 1), 16),
    )  # fmt: skip
    return out


@triton.jit
def gated_expert_kernel(
    x, weight, shared, routed, out, x_stride, shared_stride, routed_stride, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    steps = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = out.dtype.element_ty
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    row = tl.load(x + token * x_stride + steps, mask=steps < WIDTH, other=0.0).to(tl.float32)
    factor = tl.load(weight + steps, mask=steps < WIDTH, other=0.0).to(tl.float32)
    own = tl.load(shared + token * shared_stride + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    theirs = tl.load(routed + token * routed_stride + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    logit = tl.sum(row * factor, axis=0).to(DTYPE).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-logit))).to(DTYPE).to(tl.float32)
    gated = (gate * own).to(DTYPE).to(tl.float32)
    tl.store(out + token * SIZE + columns, theirs + gated, mask=columns < SIZE)
