"""Writing the keys and values of a step's tokens into the paged caches, or codes of them, in one launch."""
# Triton reads annotations as types of its own

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core_cuda.ops import launching
from core_cuda.ops.conditions import no_codes
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.quantize import to_codes, to_numbers

CODES = torch.float8_e4m3fn
"""The dtype of caches that hold codes."""

_ELEMENTS = 4096  # of one tensor, per program


def write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    query_starts: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write key (T, K, D) and value (T, K, V) into the caches (N, P, K, D or V) at slot_mapping (T,) int64, in place.

    query_starts (B + 1,): tokens from its last entry on are padding and are not written. The caches' features are
    contiguous and their slots evenly spaced (`why_not_cache`); they may have another dtype, to which values are
    rounded. Nothing is read on the host. k_scale, v_scale: of caches of codes, () or (K,), None for 1.

    Returns the tensors for attention to read: key and value themselves; for caches of codes, new tensors of the same
    dtypes with the dequantised codes (without scale).
    """
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    rounded_key = rounded_value = None
    if key_cache.dtype == CODES:
        rounded_key, rounded_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (key, value))
    num_tokens, num_heads, size = key.shape
    block_d, block_v = triton.next_power_of_2(size), triton.next_power_of_2(value.shape[2])
    spread = max(num_tokens * num_heads // launching.num_multiprocessors(), 1)  # few tokens: a program for each
    block_t = max(1, min(_ELEMENTS // max(block_d, block_v), 1 << (spread.bit_length() - 1)))
    launching.launch(
        _write_kernel,
        (triton.cdiv(num_tokens, block_t), num_heads),
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        query_starts,
        k_scale,
        v_scale,
        rounded_key,
        rounded_value,
        num_tokens,
        query_starts.shape[0] - 1,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[1:3],
        *value_cache.stride()[1:3],
        D=size,
        V=value.shape[2],
        K_SCALE=head_stride(k_scale),
        V_SCALE=head_stride(v_scale),
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        BLOCK_V=block_v,
        num_warps=4,
    )
    return (key, value) if rounded_key is None or rounded_value is None else (rounded_key, rounded_value)


def head_stride(scale: Tensor | None) -> int:
    """Return how far the scales of two heads lie apart: 0 where all have the same, or none."""
    return 0 if scale is None or scale.dim() == 0 else scale.stride(0)


def why_not_dtypes(call: OpCall) -> str | None:
    """Return why kernels cannot take the dtypes of key, value, caches and scales beside the query's, or None.

    Codes of a dtype that the GPU has no instructions for are among the reasons.
    """
    args = call.args
    dtype = args["query"].dtype
    for name in ("key", "value", "key_cache", "value_cache"):
        coded = name.endswith("_cache") and args["key_cache"].dtype == args["value_cache"].dtype == CODES
        if args[name].dtype != dtype and not coded:
            return f"{name} is {args[name].dtype} and query {dtype}, and the kernel takes one dtype"
    for name in ("k_scale", "v_scale"):
        scale = args.get(name)
        if scale is not None and scale.dtype != torch.float32:
            return f"{name} is {scale.dtype}, and the kernel computes in torch.float32"
    return no_codes(args["key_cache"].dtype)


def why_not_cache(name: str, cache: Tensor) -> str | None:
    """Return why kernels cannot address a cache (N, P, K, D) by slot, or None."""
    if cache.stride(3) != 1 or cache.stride(0) != cache.shape[1] * cache.stride(1):
        return f"{name} has strides {tuple(cache.stride())}, and the kernel takes evenly spaced slots of whole heads"
    return None


@triton.jit
def codes_of(rows, scale, CODE: tl.constexpr):
    """Return the codes of dtype CODE of rows in fp32 over their scale, None for 1, and as numbers, in fp32."""
    if scale is None:
        return to_codes(rows, 1.0, CODE), to_numbers(rows, 1.0)
    else:
        return to_codes(rows, scale, CODE), to_numbers(rows, scale)


@triton.jit
def write_rows(rows, targets, own, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows (N, BLOCK), those that are `own` (N,), from the first features on that `targets` (N,) point to."""
    features = tl.arange(0, BLOCK)
    mask = own[:, None] if SIZE == BLOCK else own[:, None] & (features < SIZE)[None, :]
    tl.store(targets[:, None] + features[None, :], rows.to(targets.dtype.element_ty), mask=mask)


@triton.jit
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    query_starts,
    k_scale,
    v_scale,
    rounded_key,
    rounded_value,
    num_tokens,
    num_seqs,
    stride_key_t,
    stride_key_h,
    stride_value_t,
    stride_value_h,
    stride_key_slot,
    stride_key_head,
    stride_value_slot,
    stride_value_head,
    D: tl.constexpr,
    V: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    tokens, head = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1).to(tl.int64)
    own = tokens < tl.minimum(tl.load(query_starts + num_seqs).to(tl.int32), num_tokens)
    slots = tl.load(slot_mapping + tokens, mask=own, other=0)
    wide, d, v = tokens.to(tl.int64)[:, None], tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    keys = tl.load(
        key + wide * stride_key_t + head * stride_key_h + d[None, :], mask=own[:, None] & (d < D)[None, :], other=0.0
    )
    values = tl.load(
        value + wide * stride_value_t + head * stride_value_h + v[None, :],
        mask=own[:, None] & (v < V)[None, :],
        other=0.0,
    )
    if rounded_key is not None:
        rows = tokens.to(tl.int64) * tl.num_programs(1) + head
        if k_scale is not None:
            k_scale = tl.load(k_scale + head * K_SCALE)
        if v_scale is not None:
            v_scale = tl.load(v_scale + head * V_SCALE)
        keys, key_numbers = codes_of(keys.to(tl.float32), k_scale, key_cache.dtype.element_ty)
        values, value_numbers = codes_of(values.to(tl.float32), v_scale, value_cache.dtype.element_ty)
        write_rows(key_numbers, rounded_key + rows * D, own, D, BLOCK_D)
        write_rows(value_numbers, rounded_value + rows * V, own, V, BLOCK_V)
    write_rows(keys, key_cache + head * stride_key_head + slots * stride_key_slot, own, D, BLOCK_D)
    write_rows(values, value_cache + head * stride_value_head + slots * stride_value_slot, own, V, BLOCK_V)
