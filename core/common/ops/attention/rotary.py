"""`core::rotary_attention`: the rotation of query and key, with or without their norms, and the attention after it.

One op for what stands between the projection of query, key and value and the output projection: `core::rotary` or
`core::qk_norm_rotary`, then `core::attention`. So a kernel may rotate a key while it writes the key into the cache, and
a query while it reads the query: neither is stored in between.

Shapes: T tokens of this step, H query heads, K key/value heads, D head size of query and key, V head size of value, R
rotated features (D unless rotary_dim says otherwise); the cache, its tables and lengths as in `core::attention`. Heads
stand behind tokens, as attention has them: one row of cos and sin turns all heads of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import core.common.ops.attention.paged as attention
from core.common.ops.arguments import Draw, check, check_floating, check_ranks, check_shape
from core.common.ops.attention.eager import by_sequence
from core.common.ops.attention.samples import step_indices
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.rotary.rotation import STYLES, check_rotary, qk_norm_rotary, rotary

# The options by the op that takes them, under the same names.
_NORM = ("query_weight", "key_weight", "eps", "offset", "norm_compute_dtype", "normed_dtype", "weight_dtype")
_TURNING = ("style", "rotary_dim", "compute_dtype", "out_dtype")
_ATTENTION = ("scale", "window", "chunked", "softcap", "sinks", "max_query_len", "k_scale", "v_scale")


def _turned_first(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an attention behind the rotation of query and key: its reference, or its form between graphs."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *places: Tensor, **options: Any
    ) -> Tensor:
        turning, norm, rest = (_named(options, names) for names in (_TURNING, _NORM, _ATTENTION))
        cos, sin = cos[:, None], sin[:, None]
        if options.get("normalize", False):
            first, second = norm.pop("query_weight", None), norm.pop("key_weight", None)
            turned = qk_norm_rotary(query, key, first, second, cos, sin, norm.pop("eps", 0.0), **norm, **turning)
        else:
            turned = rotary(query, key, cos, sin, **turning)
        return attend(*turned, value, *places, **rest)

    return run


def _named(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _check(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *places: Tensor, **options: Any
) -> None:
    op = "rotary_attention"
    check_ranks(op, 3, query=query, key=key)
    check_ranks(op, 2, cos=cos, sin=sin)
    for name, table in (("cos", cos), ("sin", sin)):
        rows = f"{name} must have a row for each of the {query.shape[0]} tokens, not {table.shape[0]}"
        check(table.shape[0] == query.shape[0], op, rows)
    check_rotary(op, {"query": query, "key": key}, cos[:, None], sin[:, None], **_named(options, _TURNING))
    if not options.get("normalize", False):
        given = [name for name in _NORM if not _is_default(options.get(name))]
        check(not given, op, f"{', '.join(given)} given, and normalize is False")
    weights = _named(options, ("query_weight", "key_weight"))
    check_floating(op, **weights)
    check_shape(op, (query.shape[-1],), **weights)
    attention.check_arguments(query, key, value, *places, **_named(options, _ATTENTION))


def _is_default(option: Any) -> bool:
    return option is None or (not isinstance(option, Tensor) and option == 0.0)


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Tensor, **options: Any) -> Tensor:
    return attention.fake(query, key, value).to(options.get("out_dtype") or query.dtype)


def _tables(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return cos and sin (T, width) of positions from 3 on, frequencies as in rotary embeddings."""
    frequencies = 10_000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(3, 3 + num_tokens, dtype=torch.float64), frequencies)
    return {"cos": angles.cos().to(dtype).to(device), "sin": angles.sin().to(dtype).to(device)}


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return the causal calls of `core::attention` without a mask, each rotated, one of them in every way."""
    dtype, device = draw.dtype, draw.device

    def turned(call: Mapping[str, Any], width: int = 16, tables: torch.dtype = dtype, **more: Any) -> dict[str, Any]:
        return {**call, **_tables(len(call["query"]), width, tables, device), **more}

    plain = {name: call for name, call in attention.calls(draw).items() if not {"mask", "causal"} & call.keys()}
    # Each op writes into its caches: no two calls share them.
    ways = {name: turned(attention.calls(draw)["chunk and mixed"], width, **way) for name, width, way in _ways(draw)}
    decode = attention.calls(draw)["decode padded"]
    merged = Draw(dtype, device, seed=22)(len(decode["query"]), 8, 16)
    parts = {"query": merged[:, :4], "key": merged[:, 4:6], "value": merged[:, 6:]}
    calls = {name: turned(call) for name, call in plain.items()} | ways
    return calls | {"parts of one tensor": turned({**decode, **parts}, 8)}


def _ways(draw: Draw) -> list[tuple[str, int, dict[str, Any]]]:
    """Return ways to rotate heads of 16, with the width of cos and sin."""
    wide = draw.wide
    weights = {name: draw(16, scale=0.4, shift=1.0) for name in ("query_weight", "key_weight")}
    near_zero = {name: weight - 1 for name, weight in weights.items()}
    gemma = {"offset": 1.0, "weight_dtype": wide, "window": 3}
    partial = {"style": "interleaved", "rotary_dim": 8}
    return [
        *(
            (f"{style}, {name}", width, {"style": style, **part})
            for style in STYLES
            for name, width, part in (("one value per pair", 8, {}), ("partial", 6, {"rotary_dim": 6}))
        ),
        ("wide tables", 16, {"tables": wide}),
        ("wide", 8, {"compute_dtype": wide}),
        ("going on wide", 8, {"compute_dtype": wide, "out_dtype": wide}),
        ("qwen3", 16, {"normalize": True, **weights, "eps": 1e-6, "normed_dtype": draw.dtype}),
        ("gemma3", 16, {"normalize": True, **near_zero, "eps": 1e-5, **gemma}),
        ("norms without weights", 8, {"normalize": True, "eps": 3e-4, "compute_dtype": wide}),
        ("norms, partial", 4, {"normalize": True, **weights, "eps": 1.5625e-7, **partial}),
    ]


ROTARY_ATTENTION = declare(
    CanonicalOp(
        schema="rotary_attention(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, "
        "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor block_table, Tensor slot_mapping, Tensor seq_lens, "
        "Tensor query_starts, *, Tensor? query_weight=None, Tensor? key_weight=None, bool normalize=False, "
        "float eps=0.0, float offset=0.0, ScalarType? norm_compute_dtype=None, ScalarType? normed_dtype=None, "
        'ScalarType? weight_dtype=None, str style="half", int rotary_dim=0, ScalarType? compute_dtype=None, '
        "ScalarType? out_dtype=None, float scale, int window=0, bool chunked=False, float softcap=0.0, "
        "Tensor? sinks=None, int max_query_len=0, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
        reference=_turned_first(attention.reference),
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=21,
        break_point=True,
        eager=_turned_first(partial(by_sequence, attention.reference)),
        indices=step_indices,
    )
)
"""Rotate query and key, write key and value into the cache, attend; gives (T, H, V) in the query's dtype.

query (T, H, D); key (T, K, D); value (T, K, V); cos and sin (T, R) or (T, R / 2). By name:

- normalize: whether query and key are normed first, as `core::qk_norm_rotary` does it with query_weight and key_weight
  (D,) or None, eps, offset, norm_compute_dtype, normed_dtype and weight_dtype; else none of these may be given.
- style, rotary_dim, compute_dtype: as in `core::rotary`; out_dtype too, which is then the dtype of the result.
- all others: as in `core::attention`, which is causal here and has no mask.

Query and key are rounded after the rotation, to out_dtype or the dtypes they have, and the key then to that of the
cache. A kernel may leave the rounding of the query out; the key is read back from the cache."""
