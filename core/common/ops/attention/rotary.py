"""`core::rotary_attention`: the rotation of query and key, with or without their norms, and the attention after it.

One op for what stands between the projection of query, key and value and the output projection: `core::rotary` or
`core::qk_norm_rotary`, then `core::attention`. A kernel may so rotate a key while it writes it into the cache, and a
query where it reads it: neither is stored in between.

Shapes: T tokens of this step, H query heads, K key/value heads, D head size of query and key, V head size of value, R
rotated features (D unless rotary_dim says otherwise); the cache, its tables and lengths as in `core::attention`. Heads
stand behind tokens, as attention has them: one row of cos and sin turns all heads of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import core.common.ops.attention.paged as attention
import core.common.ops.attention.samples as attention_samples
from core.common.ops.arguments import Draw, at_least_fp32, check
from core.common.ops.declaration import CanonicalOp, Sample, declare
from core.common.ops.rotary.rotation import STYLES, check_rotary, qk_norm_rotary, rotary

SCHEMA = (
    "rotary_attention(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor block_table, Tensor slot_mapping, Tensor seq_lens, Tensor query_starts, *, "
    "Tensor? query_weight=None, Tensor? key_weight=None, bool normalize=False, float eps=0.0, float offset=0.0, "
    "ScalarType? norm_compute_dtype=None, ScalarType? normed_dtype=None, ScalarType? weight_dtype=None, "
    'str style="half", int rotary_dim=0, ScalarType? compute_dtype=None, ScalarType? out_dtype=None, float scale, '
    "int window=0, float softcap=0.0, Tensor? sinks=None, int max_query_len=0, Tensor? k_scale=None, "
    "Tensor? v_scale=None) -> Tensor"
)
# The options by the op that takes them, under the same names.
_NORM = ("query_weight", "key_weight", "eps", "offset", "norm_compute_dtype", "normed_dtype", "weight_dtype")
_TURNING = ("style", "rotary_dim", "compute_dtype", "out_dtype")
_ATTENTION = ("scale", "window", "softcap", "sinks", "max_query_len", "k_scale", "v_scale")


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    **options: Any,
) -> Tensor:
    """Rotate query and key, write key and value into the cache, attend; returns (T, H, V) in the query's dtype.

    query (T, H, D); key (T, K, D); value (T, K, V); cos and sin (T, R) or (T, R / 2); the rest as in
    `core::attention`, which is causal here and has no mask. options, by name:

    normalize: whether query and key are normed first, as `core::qk_norm_rotary` does it with query_weight and
    key_weight (D,) or None, eps, offset, norm_compute_dtype, normed_dtype and weight_dtype; else they are only rotated,
    as by `core::rotary`, and none of these may be given. style, rotary_dim, compute_dtype: as in `core::rotary`;
    out_dtype too, which is then the dtype of the result. scale, window, softcap, sinks, max_query_len, k_scale,
    v_scale: as in `core::attention`.

    What is rotated is rounded to out_dtype, or the dtype that query and key have, and the key then to that of the
    cache. A kernel may leave the rounding of the query out; the key is read back from the cache.
    """
    turned, rest = _rotated(query, key, cos, sin, options)
    places = (key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts)
    return attention.reference(*turned, value, *places, **rest)


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    **options: Any,
) -> Tensor:
    """Do what `reference` does, the attention sequence by sequence, as their lengths say on the host."""
    turned, rest = _rotated(query, key, cos, sin, options)
    places = (key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts)
    return attention.eager(*turned, value, *places, **rest)


def _rotated(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, options: Mapping[str, Any]
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Return query and key, normed if so asked and rotated, and the options that attention takes."""
    _check(query, key, cos, sin, options)
    turning, norm, rest = (_named(options, names) for names in (_TURNING, _NORM, _ATTENTION))
    cos, sin = cos[:, None], sin[:, None]
    if not options.get("normalize", False):
        return rotary(query, key, cos, sin, **turning), rest
    first, second = norm.pop("query_weight", None), norm.pop("key_weight", None)
    return qk_norm_rotary(query, key, first, second, cos, sin, norm.pop("eps", 0.0), **norm, **turning), rest


def _named(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _check(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, options: Mapping[str, Any]) -> None:
    """Raise `RuntimeError` unless ranks, rows and the options of the norm go together."""
    op = "rotary_attention"
    for name, tensor, rank in (("query", query, 3), ("key", key, 3), ("cos", cos, 2), ("sin", sin, 2)):
        check(tensor.dim() == rank, op, f"{name} must have rank {rank}")
    for name, table in (("cos", cos), ("sin", sin)):
        rows = f"{name} must have a row for each of the {query.shape[0]} tokens, not {table.shape[0]}"
        check(table.shape[0] == query.shape[0], op, rows)
    turning = (options.get("style", "half"), options.get("rotary_dim", 0))
    check_rotary(op, {"query": query, "key": key}, cos[:, None], sin[:, None], turning)
    if not options.get("normalize", False):
        given = [name for name in _NORM if not _is_default(options.get(name))]
        check(not given, op, f"{', '.join(given)} given, and normalize is False")
    for name in ("query_weight", "key_weight"):
        weight, size = options.get(name), query.shape[-1]
        fits = weight is None or (weight.dim() == 1 and weight.shape[0] == size and weight.is_floating_point())
        check(fits, op, f"{name} must be floating-point and of shape ({size},), the head size")


def _is_default(option: Any) -> bool:
    return option is None or (not isinstance(option, Tensor) and option == 0.0)


def fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    **options: Any,
) -> Tensor:
    """Check the arguments; return (T, H, V)."""
    _check(query, key, cos, sin, options)
    places = (key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts)
    scales = _named(options, ("k_scale", "v_scale"))
    return attention.fake(query, key, value, *places, **scales).to(options.get("out_dtype") or query.dtype)


def _tables(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return cos and sin (T, width) of positions from 3 on, frequencies as in rotary embeddings."""
    frequencies = 10_000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(3, 3 + num_tokens, dtype=torch.float64), frequencies)
    return {"cos": angles.cos().to(dtype).to(device), "sin": angles.sin().to(dtype).to(device)}


def samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield the causal calls of `core::attention` without a mask, each rotated, one of them in every way."""
    calls = {
        sample.name: sample.kwargs
        for sample in attention_samples.samples(dtype, device)
        if sample.kwargs.get("mask") is None and sample.kwargs.get("causal", True)
    }
    for name, call in calls.items():
        yield Sample(name=name, kwargs={**call, **_tables(len(call["query"]), 16, dtype, device)})
    for name, width, options in _turns(dtype, device):
        # Each op writes into its caches: no two samples share them.
        call = next(s.kwargs for s in attention_samples.samples(dtype, device) if s.name == "chunk and mixed")
        tables = _tables(len(call["query"]), width, options.pop("tables", dtype), device)
        yield Sample(name=name, kwargs={**call, **tables, **options})
    decode = next(s.kwargs for s in attention_samples.samples(dtype, device) if s.name == "decode padded")
    merged = Draw(dtype, device, seed=22)(len(decode["query"]), 8, 16)
    parts = {"query": merged[:, :4], "key": merged[:, 4:6], "value": merged[:, 6:]}
    yield Sample(name="parts of one tensor", kwargs={**decode, **parts, **_tables(len(merged), 8, dtype, device)})


def _turns(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield ways to rotate heads of 16, with the width of cos and sin."""
    draw, wide = Draw(dtype, device, seed=21), at_least_fp32(dtype)
    weights = {name: draw(16, scale=0.4, shift=1.0) for name in ("query_weight", "key_weight")}
    near_zero = {name: weight - 1 for name, weight in weights.items()}
    for style in STYLES:
        yield f"{style}, one value per pair", 8, {"style": style}
        yield f"{style}, partial", 6, {"style": style, "rotary_dim": 6}
    yield "wide tables", 16, {"tables": wide}
    yield "wide", 8, {"compute_dtype": wide}
    yield "going on wide", 8, {"compute_dtype": wide, "out_dtype": wide}
    yield "qwen3", 16, {"normalize": True, **weights, "eps": 1e-6, "normed_dtype": dtype}
    gemma = {"offset": 1.0, "weight_dtype": wide, "window": 3}
    yield "gemma3", 16, {"normalize": True, **near_zero, "eps": 1e-5, **gemma}
    yield "norms without weights", 8, {"normalize": True, "eps": 3e-4, "compute_dtype": wide}
    partial = {"style": "interleaved", "rotary_dim": 8}
    yield "norms, partial", 4, {"normalize": True, **weights, "eps": 1.5625e-7, **partial}


ROTARY_ATTENTION = declare(
    CanonicalOp(
        name="rotary_attention",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        samples=samples,
        break_point=True,
        eager=eager,
    )
)
