"""Calls of ops that are derived from another op's calls: fused, rotated, or ending in a quantisation. See
`opcalls.calls`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import Sample

Calls = Callable[[Draw], Iterator[Sample]]

_FORMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "int8 by token": {"dtype": torch.int8},
        "fp8 by group": {"dtype": torch.float8_e4m3fn, "granularity": "group", "group_size": 128},
        "fp8, given scale": {"dtype": torch.float8_e4m3fn, "granularity": "tensor"},
        "int8 by group": {"dtype": torch.int8, "granularity": "group", "group_size": 128},
        "fp8 by token": {"dtype": torch.float8_e4m3fn},
    }
)


def with_derived(calls: Mapping[str, Calls]) -> dict[str, Calls]:
    """Return calls by op, with the derived ones: of fused ops, of attention with rotation, of ops that end in a
    quantisation."""
    attention, gated, rotary = calls["attention"], calls["gated_activation"], calls["rotary"]
    fused = changed(gated, _fused)
    return {
        **calls,
        "gated_activation_fused": fused,
        "rotary_single": changed(rotary, _single),
        "rotary_attention": lambda draw: _turned(draw, attention(draw)),
        "attention_quantize": lambda draw: _rows_in_codes(draw, attention(draw)),
        "rotary_attention_quantize": lambda draw: _rows_in_codes(draw, _turned(draw, attention(draw))),
        "rms_norm_quantize": lambda draw: in_codes(draw, calls["rms_norm"](draw)),
        "add_rms_norm_quantize": lambda draw: in_codes(draw, calls["add_rms_norm"](draw)),
        "gated_activation_quantize": lambda draw: in_codes(draw, (*fused(draw), *gated(draw))),
    }


def changed(calls: Calls, change: Callable[[Draw, dict[str, Any]], dict[str, Any]]) -> Calls:
    """Return calls of the same names with other arguments."""
    return lambda draw: (Sample(name=each.name, kwargs=change(draw, dict(each.kwargs))) for each in calls(draw))


def _fused(draw: Draw, call: dict[str, Any]) -> dict[str, Any]:
    """Return a gate and its factors as the halves of one tensor."""
    return {"gate_up": torch.cat((call.pop("gate"), call.pop("up")), dim=-1), **call}


def _single(draw: Draw, call: dict[str, Any]) -> dict[str, Any]:
    """Return the rotation of the queries alone."""
    del call["key"]
    return {"x": call.pop("query"), **call}


def in_codes(draw: Draw, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the calls with quantisation arguments, forms taking turns; rows that 128 does not divide are quantised by
    token."""
    forms = cycle(_FORMS.items())
    for sample in samples:
        kwargs = dict(sample.kwargs)
        width = next(value.shape[-1] for value in kwargs.values() if isinstance(value, Tensor) and value.dim() > 1)
        if "gate_up" in kwargs:
            kwargs |= {"gate": kwargs.pop("gate_up"), "up": None}
            width //= 2
        halves = "in one tensor, " if "gate_up" in sample.kwargs else ""
        name, form = next(forms)
        while form.get("group_size") and width % form["group_size"]:
            name, form = next(forms)
        given = draw(scale=0.002, shift=0.02, dtype=at_least_fp32(draw.dtype)) if "tensor" in form.values() else None
        yield Sample(name=f"{sample.name}, {halves}{name}", kwargs={**kwargs, "scale": given, **form})


def _rows_in_codes(draw: Draw, calls: Iterable[Sample]) -> Iterator[Sample]:
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
        both = tables(draw, width, num_tokens, dtype)
        yield Sample(name=f"{sample.name}, {name}", kwargs={**sample.kwargs, **both, **options})


def tables(draw: Draw, width: int, num_tokens: int, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return cos and sin (T, width) of positions from 1000 on. dtype: the draw's unless given."""
    frequencies = 10_000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(1000, 1000 + num_tokens, dtype=torch.float64), frequencies)
    pair = {"cos": angles.cos(), "sin": angles.sin()}
    return {name: values.to(dtype or draw.dtype).to(draw.device) for name, values in pair.items()}
