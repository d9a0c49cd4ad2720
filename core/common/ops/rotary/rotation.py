"""`core::rotary`, `core::rotary_single`, `core::qk_norm_rotary`: rotary position embedding of query and key.

Shapes: query and key (..., D), usually (B, H, T, D) and (B, K, T, D): B sequences, H query and K key heads, T tokens, D
head size. R is the number of rotated features, D unless rotary_dim says otherwise. cos and sin broadcast against both
once R or R / 2 wide, heads included: the caller has put the head's dimension in, as (B, 1, T, R).

Source: Su et al., arXiv 2104.09864. Styles, for a pair (a, b) turned to (a * cos - b * sin, b * cos + a * sin):

    half          pairs are (i, i + R / 2)                                Llama, Qwen, Gemma, gpt-oss
    interleaved   pairs are (2i, 2i + 1)                                  Cohere, GLM, GPT-J, Ernie
    deinterleave  pairs are (2i, 2i + 1), the result is laid out as half  DeepSeek-V3

cos and sin of width R are taken feature by feature of the result; of width R / 2, pair by pair.

Nearly all models turn query and key by the same tables at once, and one kernel then serves both; so `rotary` takes two
tensors. Where only one is turned (the layer uses another's key), or the two differ in tables, style or head size
(indexers of sparse attention), `rotary_single` is the same of one tensor: an optional key would be an optional result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, check, check_choice, check_floating, check_shape
from core.common.ops.declaration import CanonicalOp, declare
from core.common.ops.norm.norms import rms_norm

STYLES = ("half", "interleaved", "deinterleave")

_TURNING = 'str style="half", int rotary_dim=0, ScalarType? compute_dtype=None, ScalarType? out_dtype=None'
Dtype = torch.dtype | None


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **turning: Any) -> tuple[Tensor, Tensor]:
    """Return query and key, each turned as `rotary_single` does it."""
    return rotary_single(query, cos, sin, **turning), rotary_single(key, cos, sin, **turning)


def rotary_single(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    rotary_dim: int = 0,
    compute_dtype: Dtype = None,
    out_dtype: Dtype = None,
) -> Tensor:
    """Return x, query or key, with its first R features rotated and the rest as it was.

    rotary_dim: R, 0 for all of D. compute_dtype: x, cos and sin are cast to it first (OLMo, Cohere: float32); torch
    promotes x and cos to a common dtype where none is given. out_dtype: of the result, x's by default (CodeGen goes on
    in float32). Memory order: x's where all of D is rotated in style half or interleaved, else contiguous, as torch.cat
    leaves it.
    """
    width = rotary_dim or x.shape[-1]
    cos, sin = (_widened(table, width, style).to(compute_dtype or table.dtype) for table in (cos, sin))
    turned = x if width == x.shape[-1] else x[..., :width]
    if compute_dtype is not None:
        turned = turned.to(compute_dtype)
    aligned, crossed = _pair(turned, style)
    out = out_dtype or x.dtype
    rotated = (aligned * cos + crossed * sin).to(out)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:].to(out)), dim=-1)


def qk_norm_rotary(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    norm_compute_dtype: Dtype = None,
    normed_dtype: Dtype = None,
    weight_dtype: Dtype = None,
    **turning: Any,
) -> tuple[Tensor, Tensor]:
    """Return `rotary` of the `rms_norm` of query and key over their features, as Qwen 3 and Gemma 3 have it.

    query_weight and key_weight (D,). offset, normed_dtype, weight_dtype: as in `rms_norm`; norm_compute_dtype is its
    compute_dtype. The normed query and key are rounded to the dtypes they came in. turning: the keywords of `rotary`.
    """
    rounding: dict[str, Any] = {"compute_dtype": norm_compute_dtype, "normed_dtype": normed_dtype}
    rounding |= {"weight_dtype": weight_dtype, "offset": offset}
    query, key = rms_norm(query, query_weight, eps, **rounding), rms_norm(key, key_weight, eps, **rounding)
    return rotary(query, key, cos, sin, **turning)


def _widened(table: Tensor, width: int, style: str) -> Tensor:
    """Return a table with one value per feature of the result, also where it has one per pair."""
    if table.shape[-1] == width:
        return table
    return table.repeat_interleave(2, dim=-1) if style == "interleaved" else torch.cat((table, table), dim=-1)


def _pair(x: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """Return x in the order of the result, and for each feature its pair's other half, negated for the first."""
    if style == "half":
        first, second = x.chunk(2, dim=-1)
        return x, torch.cat((-second, first), dim=-1)
    first, second = x[..., ::2], x[..., 1::2]
    if style == "interleaved":
        return x, torch.stack((-second, first), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1), torch.cat((-second, first), dim=-1)


def check_rotary(
    op: str,
    turned: Mapping[str, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    rotary_dim: int = 0,
    **_: Any,
) -> None:
    """Raise `RuntimeError` unless the tensors to turn, by their names in the schema, fit what turns them."""
    check_floating(op, **turned, cos=cos, sin=sin)
    check_choice(op, "style", style, STYLES)
    (first, query), *others = turned.items()
    size = query.shape[-1]
    for name, x in others:
        check(x.shape[-1] == size, op, f"{first} has head size {size}, {name} {x.shape[-1]}")
    fits = 0 <= rotary_dim <= size and (rotary_dim or size) % 2 == 0
    check(fits, op, f"rotary_dim must be even and at most the head size {size} (0: all of it), not {rotary_dim}")
    width = rotary_dim or size
    check(cos.shape == sin.shape, op, f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ in shape")
    check(
        cos.shape[-1] == width or cos.shape[-1] * 2 == width,
        op,
        f"cos and sin must be {width} or {width // 2} wide, not {cos.shape[-1]}",
    )
    for name, x in turned.items():
        pairs = zip(reversed(cos.shape[:-1]), reversed(x.shape[:-1]), strict=False)
        fits = cos.dim() <= x.dim() and all(own in (1, whole) for own, whole in pairs)
        check(fits, op, f"cos {tuple(cos.shape)} does not broadcast to {name} {tuple(x.shape)}")


def _check(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **turning: Any) -> None:
    check_rotary("rotary", {"query": query, "key": key}, cos, sin, **turning)


def _check_single(x: Tensor, cos: Tensor, sin: Tensor, **turning: Any) -> None:
    check_rotary("rotary_single", {"x": x}, cos, sin, **turning)


def _check_qk_norm(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    **options: Any,
) -> None:
    op = "qk_norm_rotary"
    check_rotary(op, {"query": query, "key": key}, cos, sin, **options)
    check_floating(op, query_weight=query_weight, key_weight=key_weight)
    check_shape(op, (query.shape[-1],), query_weight=query_weight, key_weight=key_weight)


def _tables(draw: Draw, width: int, num_tokens: int, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return cos and sin (1, 1, T, width) of positions from 3 on, frequencies as in the paper."""
    frequencies = 10_000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(3, 3 + num_tokens, dtype=torch.float64), frequencies)[None, None]
    kind = dtype or draw.dtype
    return {"cos": angles.cos().to(kind).to(draw.device), "sin": angles.sin().to(kind).to(draw.device)}


def _heads(draw: Draw, num_tokens: int, size: int = 16) -> dict[str, Tensor]:
    """Return query (2, 4, T, D) and key (2, 2, T, D), strided as projections leave them."""
    return {n: draw(2, num_tokens, heads, size).transpose(1, 2) for n, heads in (("query", 4), ("key", 2))}


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every style with tables of either width, partial rotation, wide tables, other layouts."""
    calls: dict[str, dict[str, Any]] = {}
    for style in STYLES:
        for name, width in (("one value per pair", 8), ("one value per feature", 16)):
            calls[f"{style}, {name}"] = {**_heads(draw, 5), **_tables(draw, width, 5), "style": style}
        calls[f"{style}, partial"] = {**_heads(draw, 7), **_tables(draw, 6, 7), "rotary_dim": 6, "style": style}
    wide = draw.wide
    going_on = {"rotary_dim": 8, "out_dtype": wide}
    tables = {name: table[0].transpose(0, 1) for name, table in _tables(draw, 16, 7).items()}
    return calls | {
        "wide tables": {**_heads(draw, 5), **_tables(draw, 16, 5, wide)},
        "wide": {**_heads(draw, 5), **_tables(draw, 16, 5), "compute_dtype": wide},
        "going on wide": {**_heads(draw, 5), **_tables(draw, 8, 5, wide), **going_on},
        "no tokens": {**_heads(draw, 0), **_tables(draw, 16, 0)},
        "decode": {**_heads(draw, 1), **_tables(draw, 16, 1)},
        "tokens before heads": {"query": draw(7, 4, 16), "key": draw(7, 1, 16), **tables},
    }


def _single_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return those of `rotary`, of the query alone and in the end of the key, whose heads differ."""
    calls = _calls(draw)
    keys = {name: call.pop("key") for name, call in calls.items()}
    for call in calls.values():
        call["x"] = call.pop("query")
    last = next(reversed(calls))
    return calls | {"key": {**calls[last], "x": keys[last]}}


def _qk_norm_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return the norms of Qwen 3 and Gemma 3, no weights, and partial interleaved rotation."""
    weights = {"query_weight": draw(16, scale=0.4, shift=1.0), "key_weight": draw(16, scale=0.4, shift=1.0)}
    near_zero = {name: weight - 1 for name, weight in weights.items()}
    norms: dict[str, dict[str, Any]] = {
        "qwen3": {**weights, "eps": 1e-6, "normed_dtype": draw.dtype},
        "gemma3": {**near_zero, "eps": 1e-5, "offset": 1.0, "weight_dtype": draw.wide},
        "no weights": {**dict.fromkeys(weights), "eps": 3e-4, "compute_dtype": draw.wide},
    }
    partial = {**weights, "eps": 1.5625e-7, "style": "interleaved", "rotary_dim": 8}
    return {name: {**_heads(draw, 5), **_tables(draw, 16, 5), **norm} for name, norm in norms.items()} | {
        "partial": {**_heads(draw, 7), **_tables(draw, 4, 7), **partial},
        "no tokens": {**_heads(draw, 0), **_tables(draw, 16, 0), **weights, "eps": 1e-6},
    }


# The fakes are the references: strides follow the inputs, and only the same ops on fake tensors give exactly those.
ROTARY = declare(
    CanonicalOp(
        schema=f"rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, *, {_TURNING}) -> (Tensor query, Tensor key)",
        reference=rotary,
        fake=rotary,
        check=_check,
        calls=_calls,
        seed=6,
    )
)
ROTARY_SINGLE = declare(
    CanonicalOp(
        schema=f"rotary_single(Tensor x, Tensor cos, Tensor sin, *, {_TURNING}) -> Tensor",
        reference=rotary_single,
        fake=rotary_single,
        check=_check_single,
        calls=_single_calls,
        seed=6,
    )
)
QK_NORM_ROTARY = declare(
    CanonicalOp(
        schema="qk_norm_rotary(Tensor query, Tensor key, Tensor? query_weight, Tensor? key_weight, Tensor cos, "
        "Tensor sin, float eps, *, float offset=0.0, ScalarType? norm_compute_dtype=None, "
        f"ScalarType? normed_dtype=None, ScalarType? weight_dtype=None, {_TURNING}) -> (Tensor query, Tensor key)",
        reference=qk_norm_rotary,
        fake=qk_norm_rotary,
        check=_check_qk_norm,
        calls=_qk_norm_calls,
        seed=7,
    )
)
