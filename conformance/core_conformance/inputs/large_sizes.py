"""Calls of canonical ops whose sizes lie on both sides of usual tiles, for the suite alone: see `opcalls.calls`.

Kernels are right up to the size of their tile and wrong past it, or where the last tile is not full: rows past 64 and
128, widths that no power of two divides, widths past 1024, more heads, experts and tokens than small models have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import Sample
from core.common.ops.rotary.table import LAYOUTS, inverse_frequencies
from core_conformance.inputs import large_linears as linears
from core_conformance.inputs import large_recurrent as recurrent
from core_conformance.inputs.large import head_tables, heads
from core_conformance.inputs.large_attention import dense_attention_sizes, paged_attention_sizes
from core_conformance.inputs.large_derived import Calls, changed, with_derived
from core_conformance.inputs.large_sampling import most_likely_sizes, sampled_sizes

_SHAPES = ((129, 1000), (65, 1001), (3, 4096))
"""Rows and width: many rows, an odd width, a wide row."""


def rms_norm(draw: Draw) -> Iterator[Sample]:
    """Yield one call per shape; in the wide rows the squares sum up to more than fp16 holds."""
    for rows, width in _SHAPES:
        weight, scale = draw(width, scale=0.4, shift=1.0), 5.0 if width > 1024 else 1.0
        call = {"x": draw(rows, width, scale=scale), "weight": weight, "eps": 1e-5}
        yield Sample(name=f"{rows} rows of {width}", kwargs=call)


def gated_activation(draw: Draw) -> Iterator[Sample]:
    """Yield one kind per shape."""
    for kind, shape in zip(("silu", "gelu", "gelu_tanh"), _SHAPES, strict=True):
        call = {"gate": draw(*shape, scale=2.0), "up": draw(*shape), "kind": kind}
        yield Sample(name=f"{kind}, {shape[0]} rows of {shape[1]}", kwargs=call)


def rotary(draw: Draw) -> Iterator[Sample]:
    """Yield 32 heads of 130 tokens."""
    kwargs = {**heads(draw, 130, 64, (32, 8)), **head_tables(draw, 64, 130)}
    yield Sample(name="32 heads, 130 tokens", kwargs=kwargs)


def qk_norm_rotary(draw: Draw) -> Iterator[Sample]:
    """Yield those of `rotary` with a norm before."""
    weights = {name: draw(64, scale=0.4, shift=1.0) for name in ("query_weight", "key_weight")}
    return changed(rotary, lambda draw, call: {**call, **weights, "eps": 1e-5})(draw)


def rotary_table(draw: Draw) -> Iterator[Sample]:
    """Yield 130 tokens of 48 frequencies, and three of 300, in every layout."""
    for layout, count, num_tokens in zip(LAYOUTS, (48, 300, 48), (130, 3, 1025), strict=True):
        frequencies = inverse_frequencies(count, draw.dtype, draw.device)
        positions = torch.arange(7, 7 + num_tokens, device=draw.device)[None]
        kwargs = {"positions": positions, "inv_freq": frequencies, "layout": layout, "out_dtype": draw.dtype}
        yield Sample(name=f"{layout}, {count} frequencies, {num_tokens} tokens", kwargs=kwargs)


def moe_route(draw: Draw) -> Iterator[Sample]:
    """Yield 300 tokens for 128 experts."""
    kwargs = {"logits": draw(300, 128), "top_k": 8, "renormalize": True}
    yield Sample(name="128 experts, 300 tokens", kwargs=kwargs)


def grouped_mlp(draw: Draw) -> Iterator[Sample]:
    """Yield 200 tokens for four of 32 experts each, with a gate and without."""
    experts, size, inner, num_tokens = 32, 128, 64, 200
    gate_up = draw(experts, 2 * inner, size, scale=size**-0.5)
    kwargs = {
        "x": draw(num_tokens, size),
        "weights": draw(num_tokens, 4).sigmoid(),
        "indices": draw(num_tokens, experts, dtype=torch.float64).argsort(-1)[:, :4],
        "gate_up": gate_up,
        "down": draw(experts, size, inner, scale=inner**-0.5),
        "kind": "silu",
    }
    yield Sample(name="32 experts, 200 tokens", kwargs=kwargs)
    plain = {"gate_up": gate_up[:, inner:].contiguous(), "kind": "relu2", "gated": False}
    yield Sample(name="32 experts without a gate, 200 tokens", kwargs={**kwargs, **plain})


def quantize(draw: Draw) -> Iterator[Sample]:
    """Yield each format by token, and one by tensor and by group each."""
    calls = (
        (torch.int8, "token", 0, (129, 1000)),
        (torch.float8_e4m3fn, "token", 0, (65, 1001)),
        (torch.int8, "tensor", 0, (65, 1001)),
        (torch.float8_e4m3fn, "group", 128, (65, 4096)),
    )
    for code, granularity, size, shape in calls:
        name = f"{str(code).removeprefix('torch.')} by {granularity}, {shape[0]} rows of {shape[1]}"
        options = {"dtype": code, "granularity": granularity, "group_size": size}
        yield Sample(name=name, kwargs={"x": draw(*shape, scale=3.0), "scale": None, **options})


def quantized_linear(draw: Draw) -> Iterator[Sample]:
    """Yield 65 rows of 4096 for 130 columns, scales by token and channel.

    The codes of int8 are off zero: their sums pass 2**21, and stay under the 2**24 up to which fp32 counts.
    """
    wide = at_least_fp32(draw.dtype)
    for code, scale, shift in ((torch.int8, 20.0, 40.0), (torch.float8_e4m3fn, 40.0, 0.0)):
        pairs = [draw(rows, 4096, scale=scale, shift=shift, dtype=torch.float32) for rows in (65, 130)]
        codes = [values.clamp(-127, 127).to(code) for values in pairs]
        scales = [draw(rows, 1, scale=0.0002, shift=0.001, dtype=wide) for rows in (65, 130)]
        call = {"x_codes": codes[0], "x_scale": scales[0], "w_codes": codes[1], "w_scale": scales[1]}
        title = f"{str(code).removeprefix('torch.')}, 65 rows of 4096"
        yield Sample(name=title, kwargs={**call, "bias": draw(130), "out_dtype": draw.dtype})


SIZES: Mapping[str, Calls] = MappingProxyType(
    with_derived(
        {
            "attention": paged_attention_sizes,
            "dense_attention": dense_attention_sizes,
            "rms_norm": rms_norm,
            "add_rms_norm": changed(rms_norm, lambda draw, call: {"residual": draw(*call["x"].shape), **call}),
            "layer_norm": changed(rms_norm, lambda draw, call: {**call, "bias": draw(call["x"].shape[-1])}),
            "gated_activation": gated_activation,
            "rotary": rotary,
            "qk_norm_rotary": qk_norm_rotary,
            "rotary_table": rotary_table,
            "linear": linears.linear_sizes,
            "gated_linear": linears.gated_linear_sizes,
            "add_lora": linears.lora_sizes,
            "moe_route": moe_route,
            "grouped_mlp": grouped_mlp,
            "quantize": quantize,
            "quantized_linear": quantized_linear,
            "quantize_asymmetric": linears.asymmetric_sizes,
            "weight_only_linear": linears.weight_only_sizes,
            "quantized_grouped_linear": linears.grouped_sizes,
            "quantize_fp4": linears.quantize_fp4_sizes,
            "sample": sampled_sizes,
            "argmax": most_likely_sizes,
        }
    )
    | dict(recurrent.SIZES)
)
"""Name of an op -> its calls past the tiles; collectives have none, a single process moves nothing."""
