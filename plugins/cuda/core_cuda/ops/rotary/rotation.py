"""Rotary position embedding: `core::rotary`, `core::rotary_single`, `core::qk_norm_rotary`, and the first half of
`core::rotary_attention`, which writes the cache as well. Each is one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpCall
from core.common.ops.rotary.rotation import QK_NORM_ROTARY, ROTARY, ROTARY_SINGLE
from core_cuda.ops import launching
from core_cuda.ops.cache_write import CODES, head_stride
from core_cuda.ops.conditions import dtypes
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rotary.kernel import rotary_kernel
from core_cuda.ops.rows import TYPES, outputs

_MAX_RANK = 4
_PER_THREAD = 16  # values of a row to a thread, at most: they are fp32, beside those of cos and sin


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryConfig:
    """How heads of tokens are shared out among programs."""

    #: heads of tokens that a program turns
    rows: int
    num_warps: int


def choose(num_rows: int, head_size: int) -> RotaryConfig:
    """Return how num_rows heads of tokens, of query, key and value together, are shared out.

    Few are spread over as many programs as there are multiprocessors, since then only latency counts.
    """
    block = triton.next_power_of_2(head_size)
    spread = max(num_rows // launching.num_multiprocessors(), 1)
    rows = min(1 << (spread.bit_length() - 1), max(4 * 32 * _PER_THREAD // block, 1))
    return RotaryConfig(rows=rows, num_warps=min(max(rows * block // (32 * _PER_THREAD), 1), 4))


def candidates(num_rows: int, head_size: int) -> tuple[RotaryConfig, ...]:
    """Return the configurations worth timing, the chosen one first."""
    chosen, block = choose(num_rows, head_size), triton.next_power_of_2(head_size)
    others = (
        RotaryConfig(rows=rows, num_warps=num_warps)
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for num_warps in (1, 2, 4, 8)
        if 4 <= rows * block // (32 * num_warps) <= 2 * _PER_THREAD and rows <= num_rows
    )
    return (chosen, *(other for other in others if other != chosen))


def why_not(call: OpCall) -> str | None:
    """Return why the kernels cannot take a call of one of the rotary ops, or None."""
    for name in ("query", "key", "x"):
        if name in call.args and call.args[name].dim() > _MAX_RANK:
            return f"{name} has rank {call.args[name].dim()}, and the kernel takes up to {_MAX_RANK}"
    return dtypes(call)


def _turned(op: CanonicalOp, cos: Tensor, sin: Tensor, **args: Any) -> Any:
    """Turn query and key, or one tensor alone, normed first where the op says so, in one launch."""
    names = [name for name in ("query", "key", "x") if name in args]
    made = outputs(op, {"cos": cos, "sin": sin, **args}, cos.device)
    first, *second = ((args[n], out, args.get(f"{n}_weight")) for n, out in zip(names, made, strict=True))
    _run(first, second[0] if second else None, cos, sin, {"normalize": op is QK_NORM_ROTARY, **args})
    return tuple(made) if second else made[0]


rotary, rotary_single, qk_norm_rotary = (
    kernel_of(op)(partial(_turned, op)) for op in (ROTARY, ROTARY_SINGLE, QK_NORM_ROTARY)
)


def rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Norm if asked and turn query (T, H, D) and key (T, K, D), cos and sin (T, R or R / 2); both new and contiguous.

    options: normalize and those of the norm and of the rotation, as in `core::rotary_attention`. The new query has
    out_dtype, query's own by default, the new key key's.
    """
    turned = torch.empty(query.shape, dtype=options.get("out_dtype") or query.dtype, device=query.device)
    turned_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    _run((query, turned, query_weight), (key, turned_key, key_weight), cos[:, None], sin[:, None], options)
    return turned, turned_key


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    query_starts: Tensor,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    config: RotaryConfig | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm if asked and turn query (T, H, D) and key (T, K, D), and write key and value (T, K, V) into the caches.

    cos and sin (T, R or R / 2). options: normalize and those of the norm and of the rotation, as in
    `core::rotary_attention`. Tokens from the last entry of query_starts (B + 1,) on are padding and are not written;
    caches as `why_not_cache` lets pass. k_scale, v_scale: of caches of codes, () or (K,), None for 1.

    Returns the new query in out_dtype, and the key and value to attend to: the new key in the cache's dtype and value
    itself; or, where the cache holds codes, new tensors of the codes as numbers, in the dtypes of key and value.
    """
    codes = key_cache.dtype == CODES
    turned = torch.empty(query.shape, dtype=options.get("out_dtype") or query.dtype, device=query.device)
    turned_key = torch.empty(key.shape, dtype=key.dtype if codes else key_cache.dtype, device=key.device)
    rounded = torch.empty(value.shape, dtype=value.dtype, device=value.device) if codes else None
    _run(
        (query, turned, query_weight),
        (key, turned_key, key_weight),
        cos[:, None],
        sin[:, None],
        options,
        places=(value, key_cache, value_cache, slot_mapping, query_starts),
        coding=(k_scale, v_scale, rounded),
        config=config,
    )
    return turned, turned_key, value if rounded is None else rounded


_Turning = tuple[Tensor, Tensor, Tensor | None]  # the tensor to rotate, its result, the weight of its norm


def _run(
    query: _Turning,
    key: _Turning | None,
    cos: Tensor,
    sin: Tensor,
    options: Mapping[str, Any],
    *,
    places: tuple[Tensor, ...] = (),
    coding: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    config: RotaryConfig | None = None,
) -> None:
    """Launch the kernel; places: value, the two caches, slot_mapping, query_starts, where the cache is written.

    coding: scales of keys and values, and where to leave the codes of the values as numbers; of caches of codes.
    """
    size, dtype = query[0].shape[-1], query[0].dtype
    turned = options.get("rotary_dim") or size
    compute = options.get("compute_dtype")
    table = compute or torch.promote_types(cos.dtype, sin.dtype)
    promoted = compute or torch.promote_types(dtype, table)
    first, extent, strides = _walk(query, cos, sin, keep_order=bool(places))
    # A tensor without rows replaces the missing one.
    second = _walk(key, cos, sin, keep_order=bool(places)) if key else (first, (0, 1, 1), strides)
    num_rows = extent[0] + second[1][0] * (2 if places else 1)
    config = config or choose(num_rows, size)
    value_size = 1
    writing: dict[str, Any] = {"value": None, "key_cache": None, "value_cache": None, "slot_mapping": None}
    blocks, num_seqs, starts = triton.cdiv(extent[0], config.rows) + triton.cdiv(second[1][0], config.rows), 0, None
    if places:
        value, key_cache, value_cache, slot_mapping, starts = places
        value = value if value.stride(-1) == 1 else value.contiguous()
        value_size, num_seqs = value.shape[-1], starts.shape[0] - 1
        blocks += triton.cdiv(second[1][0], config.rows)
        writing = {
            "value": (value, *value.stride()[:2]),
            "key_cache": (key_cache, *key_cache.stride()[1:3]),
            "value_cache": (value_cache, *value_cache.stride()[1:3]),
            "slot_mapping": slot_mapping,
        }
    launching.launch(
        rotary_kernel,
        (blocks,),
        query=first,
        query_extent=extent,
        query_strides=strides,
        key=second[0],
        key_extent=second[1],
        key_strides=second[2],
        **writing,
        query_starts=starts,
        k_scale=coding[0],
        v_scale=coding[1],
        rounded=coding[2],
        num_seqs=num_seqs,
        eps=options.get("eps", 0.0),
        offset=options.get("offset", 0.0),
        STYLE=options.get("style", "half"),
        PER_PAIR=cos.shape[-1] != turned,
        SIZE=size,
        TURNED=turned,
        QUERY_NORM=_norm(dtype, query[2], options),
        KEY_NORM=_norm(dtype, key[2] if key else None, options),
        COMPUTE=None if compute is None else TYPES[compute],
        TABLE=TYPES[table],
        PROMOTED=TYPES[promoted],
        WRITE=bool(places),
        VALUE_SIZE=value_size,
        K_SCALE=head_stride(coding[0]),
        V_SCALE=head_stride(coding[1]),
        ROWS=config.rows,
        BLOCK=triton.next_power_of_2(turned // 2),
        TAIL=triton.next_power_of_2(max(size - turned, 1)),
        BLOCK_V=triton.next_power_of_2(value_size),
        num_warps=config.num_warps,
    )
    for (_, belongs, _), (_, written, *_) in zip(filter(None, (query, key)), (first, second[0]), strict=False):
        if written is not belongs:
            belongs.copy_(written)


def _walk(turning: _Turning, cos: Tensor, sin: Tensor, *, keep_order: bool) -> tuple[Any, Any, Any]:
    """Return a kernel's tensors, its extent (rows, middle, inner) and the strides that lead to each tensor's rows.

    Rows are walked in the order of x's memory, unless keep_order, where the shape is (tokens, heads, features).
    """
    x, out, weight = turning
    x, cos, sin = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (x, cos, sin))
    if out.stride(-1) != 1:
        out = torch.empty(out.shape, dtype=out.dtype, device=out.device)  # to be copied to where it belongs
    sizes = x.shape[:-1]
    spread = (x, out, *(table.expand(*sizes, table.shape[-1]) for table in (cos, sin)))
    dims = list(range(len(sizes))) if keep_order else sorted(range(len(sizes)), key=lambda d: -x.stride()[d])
    missing = _MAX_RANK - 1 - len(dims)
    strides = tuple(s for t in spread for s in (*(0,) * missing, *(t.stride(d) for d in dims)))
    _, middle, inner = (*(1,) * missing, *(sizes[d] for d in dims))
    weight = weight if weight is None else weight.contiguous()  # the kernel reads it feature by feature
    return (x, out, cos, sin, weight), (sizes.numel(), middle, inner), strides


def _norm(dtype: torch.dtype, weight: Tensor | None, options: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the dtypes of a norm's steps as the kernel takes them, or None where there is no norm."""
    if not options.get("normalize"):
        return None
    computed = options.get("norm_compute_dtype") or torch.float32
    normed = options.get("normed_dtype") or computed
    if weight is None:
        return TYPES[computed], TYPES[normed], None, None
    factor = options.get("weight_dtype") or weight.dtype
    return TYPES[computed], TYPES[normed], TYPES[factor], TYPES[torch.promote_types(normed, factor)]
