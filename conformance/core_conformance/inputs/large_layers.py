"""Larger calls of the ops that stand for parts of a layer: rotation with attention, linears with a gate.

See `opcalls.calls`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import Sample
from core_conformance.inputs.large_attention import paged_attention, paged_attention_sizes


def rotary_attention(draw: Draw) -> Iterator[Sample]:
    """Yield those of `paged_attention`, plain first, then normed, a part rotated, and neighbours rotated."""
    return _turned(draw, paged_attention(draw))


def rotary_attention_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield those of `paged_attention_sizes`, every second one normed."""
    return _turned(draw, paged_attention_sizes(draw))


def in_codes(draw: Draw, calls: Iterable[Sample]) -> Iterator[Sample]:
    """Let calls of attention end in codes, most of them of one scale that is given."""
    wide = at_least_fp32(draw.dtype)
    for index, sample in enumerate(calls):
        scale = None if index % 3 == 2 else torch.tensor(0.00931, dtype=wide, device=draw.device)
        code = torch.int8 if index % 2 else torch.float8_e4m3fn
        options = {"out_scale": scale, "dtype": code, "granularity": "token" if scale is None else "tensor"}
        title = f"{sample.name}, {str(code).removeprefix('torch.')}"
        yield Sample(name=title, kwargs={**sample.kwargs, **options})


def _turned(draw: Draw, calls: Iterable[Sample]) -> Iterator[Sample]:
    """Add a rotation to calls of attention, another one in turn."""
    wide = at_least_fp32(draw.dtype)
    for index, sample in enumerate(calls):
        num_tokens, _, size = sample.kwargs["query"].shape
        weights = {name: draw(size, scale=0.4, shift=1.0) for name in ("query_weight", "key_weight")}
        norm = {"normalize": True, **weights, "eps": 1e-5}
        half, quarter = size // 2, size // 4
        ways: tuple[tuple[str, int, torch.dtype, dict[str, Any]], ...] = (
            ("rotated", size, draw.dtype, {}),
            ("normed and rotated", half, draw.dtype, {**norm, "normed_dtype": draw.dtype}),
            ("half of it rotated", half, wide, {"rotary_dim": half}),
            ("normed, half of it rotated", quarter, draw.dtype, {**norm, "rotary_dim": half, "style": "interleaved"}),
        )
        name, width, dtype, options = ways[index % len(ways)]
        tables = _tables(draw, num_tokens, width, dtype)
        yield Sample(name=f"{sample.name}, {name}", kwargs={**sample.kwargs, **tables, **options})


def _tables(draw: Draw, num_tokens: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return cos and sin (T, width) of positions from 1000 on."""
    frequencies = 10_000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(1000, 1000 + num_tokens, dtype=torch.float64), frequencies)
    return {"cos": angles.cos().to(dtype).to(draw.device), "sin": angles.sin().to(dtype).to(draw.device)}


def linear(draw: Draw) -> Iterator[Sample]:
    """Yield 1024 in and 96 out, for several rows and for one, with and without a bias."""
    weight, bias = draw(96, 1024, scale=1024**-0.5), draw(96)
    yield Sample(name="1024 in, 96 out", kwargs={"x": draw(9, 1024), "weight": weight, "bias": bias})
    yield Sample(name="1024 in, 96 out, one row", kwargs={"x": draw(1, 1024), "weight": weight, "bias": None})
    far = {"x": draw(9, 1024, shift=4.0), "weight": weight, "bias": bias}
    yield Sample(name="1024 in, 96 out, x far from zero", kwargs=far)


def linear_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield rows, widths and results past usual tiles, in each of which the last tile is not full."""
    for rows, width, outputs in _SHAPES:
        call = {"x": draw(rows, width), "weight": draw(outputs, width, scale=width**-0.5), "bias": draw(outputs)}
        yield Sample(name=f"{rows} rows of {width}, {outputs} out", kwargs=call)


_SHAPES = ((129, 1000, 257), (65, 1001, 130), (33, 4096, 66), (17, 520, 1026), (3, 4096, 1032), (1, 2056, 514))
"""Rows, width and results."""


def gated_linear(draw: Draw) -> Iterator[Sample]:
    """Yield 1024 in and 96 out, for several rows and for one."""
    weight = draw(192, 1024, scale=1024**-0.5)
    for kind, rows in (("silu", 9), ("gelu_tanh", 1), ("gelu", 9)):
        call = {"x": draw(rows, 1024), "weight": weight, "bias": None, "kind": kind}
        yield Sample(name=f"{kind}, 1024 in, 96 out, {rows} rows", kwargs=call)


def gated_linear_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield those of `linear_sizes` with as many results for the gate as for up."""
    for rows, width, outputs in _SHAPES:
        weight = draw(2 * outputs, width, scale=width**-0.5)
        call = {"x": draw(rows, width), "weight": weight, "bias": draw(2 * outputs), "kind": "silu"}
        yield Sample(name=f"{rows} rows of {width}, {outputs} out", kwargs=call)
