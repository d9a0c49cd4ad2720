"""The decays and learning rates of the gated delta rule, in one launch: what its layers compute of two projections.

Yang, Kautz and Hatamizadeh, arXiv 2412.06464: the logarithm of a decay is `-exp(A_log) * softplus(a + dt_bias)`, a
learning rate `sigmoid(b)`. Torch's own ops take eight to twelve launches for both.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from core_cuda.ops import launching
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.recurrent.states import exponential, softplus
from core_cuda.ops.registration import own_kernel
from core_cuda.ops.rows import TYPES

_BLOCK = 512
"""Numbers of a program. A step of one sequence has fewer; prompts have enough for every multiprocessor."""
_SCHEMA = (
    "delta_gates(Tensor a, Tensor log_rate, Tensor bias, Tensor? b, *, int[] sizes, int a_dims, int b_dims=1, "
    "ScalarType? rounded=None, float factor=1.0) -> (Tensor, Tensor)"
)


def why_not(a: Tensor, log_rate: Tensor, bias: Tensor, sizes: tuple[int, ...]) -> str:
    """Return why the kernel can't take these arguments of `delta_gates`, or ""."""
    if any(type(size) is not int or size < 1 for size in sizes):
        return f"a token has {sizes} decays, and the kernel takes one or more, in numbers that do not vary"
    for name, each in (("a", a), ("A_log", log_rate), ("dt_bias", bias)):
        if each.dtype not in DTYPES:
            return f"{name} is {each.dtype}, which the kernel does not take"
    if log_rate.numel() != sizes[0] or bias.numel() != prod(sizes):
        counts = f"{log_rate.numel()} of A_log, {bias.numel()} of dt_bias"
        return f"a token has {sizes} decays, and the weights {counts}"
    return ""


def _lead(x: Tensor, dims: int) -> tuple[Any, ...]:
    return tuple(x.shape[: x.dim() - dims])


def _reference(
    a: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    b: Tensor | None,
    *,
    sizes: list[int],
    a_dims: int,
    b_dims: int = 1,
    rounded: torch.dtype | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    steps = a.float().reshape(*_lead(a, a_dims), *sizes) + bias.float().reshape(sizes)
    rates = log_rate.float().exp().reshape(sizes[0], *[1] * (len(sizes) - 1))
    decay = -rates * functional.softplus(steps)
    if b is None:
        return decay, decay.new_empty(0)
    learned = b.float().sigmoid().to(rounded or torch.float32).reshape(*_lead(b, b_dims), sizes[0])
    return decay, learned * factor if factor != 1.0 else learned


def _fake(
    a: Tensor, log_rate: Tensor, bias: Tensor, b: Tensor | None, *, sizes: list[int], a_dims: int, **options: Any
) -> tuple[Tensor, Tensor]:
    decay = a.new_empty((*_lead(a, a_dims), *sizes), dtype=torch.float32)
    if b is None:
        return decay, decay.new_empty(0)
    shape = (*_lead(b, options.get("b_dims", 1)), sizes[0])
    return decay, b.new_empty(shape, dtype=options.get("rounded") or torch.float32)


@own_kernel(_SCHEMA, _fake, _reference)
def delta_gates(
    a: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    b: Tensor | None,
    *,
    sizes: list[int],
    a_dims: int,
    b_dims: int = 1,
    rounded: torch.dtype | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return -exp(log_rate) * softplus(a + bias), fp32, and factor * sigmoid(b), in the dtype `rounded`; contiguous.

    sizes: (H,), or (H, D) with a decay for each feature of a key. a: its last a_dims dimensions, one or two, hold the
    H * D numbers of a token; those of b likewise H. The results have the sizes (..., *sizes) and (..., H). log_rate and
    bias: H and H * D numbers, of any shape. sigmoid(b) is rounded before it is multiplied, and after. For calls that
    `why_not` lets pass. Without b the second result has no numbers.
    """
    decay, beta = _fake(a, log_rate, bias, b, sizes=sizes, a_dims=a_dims, b_dims=b_dims, rounded=rounded)
    a, b = _in_groups(a, a_dims), None if b is None else _in_groups(b, b_dims)
    decays = triton.cdiv(decay.numel(), _BLOCK)
    launching.launch(
        delta_gates_kernel,
        (decays + triton.cdiv(beta.numel(), _BLOCK),),
        a,
        b,
        log_rate.contiguous(),
        bias.contiguous(),
        decay,
        beta,
        decays,
        decay.numel(),
        beta.numel(),
        *a.stride()[:2],
        *((0, 0) if b is None else b.stride()[:2]),
        FACTOR=factor,
        ROUNDED=TYPES[beta.dtype],
        HEADS=sizes[0],
        FEATURES=prod(sizes[1:]),
        A_GROUP=a.shape[2],
        B_GROUP=1 if b is None else b.shape[2],
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return decay, beta


def _in_groups(x: Tensor, dims: int) -> Tensor:
    """Return (tokens, groups, numbers), the last ones side by side; a copy only where two strides don't lead there."""
    last = x.shape[x.dim() - dims :]
    x = x.reshape(-1, *([1] if dims == 1 else []), *last)
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=["decays", "decay_count", "beta_count"])  # one kernel for all numbers of tokens
def delta_gates_kernel(
    a, b, log_rate, bias, decay, beta, decays, decay_count, beta_count, a_row, a_group, b_row, b_group,
    FACTOR: tl.constexpr, ROUNDED: tl.constexpr, HEADS: tl.constexpr, FEATURES: tl.constexpr, A_GROUP: tl.constexpr,
    B_GROUP: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK decays, of the first `decays` programs, or BLOCK learning rates; count: how many there are of each."""
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    program = tl.program_id(0).to(tl.int64)
    if program < decays:
        at = program * BLOCK + tl.arange(0, BLOCK)
        mask = at < decay_count
        row, column = at // (HEADS * FEATURES), (at % (HEADS * FEATURES)).to(tl.int32)
        places = row * a_row + (column // A_GROUP) * a_group + column % A_GROUP
        steps = tl.load(a + places, mask=mask, other=0.0).to(tl.float32)
        steps += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        rates = exponential(tl.load(log_rate + column // FEATURES, mask=mask, other=0.0).to(tl.float32))
        tl.store(decay + at, -rates * softplus(steps), mask=mask)
    elif b is not None:
        at = (program - decays) * BLOCK + tl.arange(0, BLOCK)
        mask = at < beta_count
        row, column = at // HEADS, (at % HEADS).to(tl.int32)
        places = row * b_row + (column // B_GROUP) * b_group + column % B_GROUP
        learned = tl.sigmoid(tl.load(b + places, mask=mask, other=0.0).to(tl.float32))
        tl.store(beta + at, learned.to(ROUNDED).to(tl.float32) * FACTOR, mask=mask)
