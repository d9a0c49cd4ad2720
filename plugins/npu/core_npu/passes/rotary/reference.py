"""References of torch_npu's rotations, cache writes and batched products, from CANN's formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core_npu.passes.reference import formula, normed, require, wide

__all__ = ["turned"]


def turned(x: Tensor, cos: Tensor, sin: Tensor, mode: str = "half") -> Tensor:
    """Return x rotated, not rounded; cos and sin of x's width."""
    x = wide(x)
    if mode == "half":
        first, second = x.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    else:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * wide(cos) + other * wide(sin)


@formula
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return x with its pairs rotated."""
    require(rotate is None)
    return turned(input, r1, r2, rotary_mode).to(input.dtype)


@formula
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Rotate query and key in place, as the kernel does against its schema, and return them."""
    for x in (query, key):
        x.copy_(turned(x, cos, sin, rotary_mode))
    return query, key


@formula
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Return query and key (T, H * D) rotated by the rows of a table at their positions."""
    require(positions.ndim == 1 and not any(mrope_section or ()) and cos_sin_cache.shape[-1] == head_size)
    cos, sin = (torch.cat((half, half), -1)[:, None] for half in cos_sin_cache[positions].chunk(2, -1))
    first, second = (turned(x.unflatten(-1, (-1, head_size)), cos, sin).flatten(-2).to(x.dtype) for x in (query, key))
    return first, second


def slots(cache: Tensor, rows: Tensor, index: Tensor, *, fractal: bool) -> None:
    """Write rows (T, H, D) into a cache (blocks, block, H, D), fractal: (blocks, H * D / 16, block, 16).

    index: the slot of each row, over all blocks.
    """
    block = cache.shape[2] if fractal else cache.shape[1]
    index = index.long()
    if fractal:
        cache[index // block, :, index % block] = rows.reshape(rows.shape[0], -1, cache.shape[-1])
    else:
        cache[index // block, index % block] = rows


@formula
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
    **others: Any,
) -> None:
    """Write keys and values (T, H, D) at their slots of the caches."""
    for into, rows in ((key_cache, key), (value_cache, value)):
        slots(into, rows, slot_mapping, fractal=cache_mode == "PA_NZ")


@formula
def npu_qkv_rms_norm_rope_cache(
    qkv: Tensor,
    q_gamma: Tensor,
    k_gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv_size: list[int],
    head_nums: list[int],
    *,
    epsilon: float = 1e-6,
    cache_mode: str = "PA_NZ",
    is_output_qkv: bool = False,
    **others: Any,
) -> tuple[Tensor, ...]:
    """Write the normed and rotated query, and the key and value at their slots; return nothing of use."""
    require(cache_mode == "PA_NZ" and not is_output_qkv and qkv_size[0] * qkv_size[1] == qkv.shape[0])
    require(sum(head_nums) == qkv_size[2] and head_nums[1] == head_nums[2] and index.dtype == torch.int64)
    heads = qkv.unflatten(-1, (qkv_size[2], qkv_size[3])).split(head_nums, 1)
    query, key = (
        turned(normed(x, gamma, epsilon)[0], cos[:, None], sin[:, None]).to(qkv.dtype)
        for x, gamma in zip(heads, (q_gamma, k_gamma), strict=False)
    )
    q_out.copy_(query.flatten(1))
    slots(k_cache, key, index, fractal=True)
    slots(v_cache, heads[2], index, fractal=True)
    first, second, third = (qkv.new_empty(()) for _ in range(3))
    return first, second, third


@formula
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    **others: Any,
) -> Tensor:
    """Return the product of permuted batches, rows before batches."""
    left, right = input.permute(perm_x1 or [0, 1, 2]), weight.permute(perm_x2 or [0, 1, 2])
    return (wide(left) @ wide(right)).permute(perm_y or [1, 0, 2]).to(input.dtype).contiguous()
