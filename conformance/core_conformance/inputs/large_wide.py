"""Calls of canonical ops with rows past 8,192 columns, and with more than 2**20 elements: see `opcalls.calls`.

Kernels hold a row in the registers of one block up to some width, and another path takes over past it; and an index of
an element is counted in a grid that is capped. Both are right on every smaller call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import Sample
from core.common.ops.rotary.table import inverse_frequencies
from core_conformance.inputs import large_recurrent as recurrent
from core_conformance.inputs.large import head_tables, heads
from core_conformance.inputs.large_attention import dense_attention_far, paged_attention_far
from core_conformance.inputs.large_derived import Calls, changed, with_derived
from core_conformance.inputs.large_linears import lora_wide, of_experts, quantised_weights

SHAPES = ((5, 8704), (65, 16_512))
"""Rows and width: past 8,192 columns; past 16,384 columns and 2**20 elements. Groups of 128 fit, no tile of 1,024."""


def _title(rows: int, width: int) -> str:
    return f"{rows} rows of {width}"


def rms_norm(draw: Draw) -> Iterator[Sample]:
    """Yield one call per shape."""
    for rows, width in SHAPES:
        call = {"x": draw(rows, width), "weight": draw(width, scale=0.4, shift=1.0), "eps": 1e-5}
        yield Sample(name=_title(rows, width), kwargs=call)


def gated_activation(draw: Draw) -> Iterator[Sample]:
    """Yield one kind per shape."""
    for kind, shape in zip(("gelu_tanh", "silu"), SHAPES, strict=True):
        yield Sample(
            name=f"{kind}, {_title(*shape)}", kwargs={"gate": draw(*shape, scale=2.0), "up": draw(*shape), "kind": kind}
        )


def rotary(draw: Draw) -> Iterator[Sample]:
    """Yield 8 heads of 1,030 tokens, more than 2**20 numbers."""
    yield Sample(name="1030 tokens", kwargs={**heads(draw, 1030, 64, (8, 1)), **head_tables(draw, 64, 1030)})


def qk_norm_rotary(draw: Draw) -> Iterator[Sample]:
    """Yield that of `rotary` with a norm before."""
    weights = {name: draw(64, scale=0.4, shift=1.0) for name in ("query_weight", "key_weight")}
    return changed(rotary, lambda draw, call: {**call, **weights, "eps": 1e-5})(draw)


def rotary_table(draw: Draw) -> Iterator[Sample]:
    """Yield 16,400 tokens of 64 frequencies."""
    positions = torch.arange(5, 5 + 16_400, device=draw.device)[None]
    frequencies = inverse_frequencies(64, draw.dtype, draw.device)
    kwargs = {"positions": positions, "inv_freq": frequencies, "out_dtype": draw.dtype}
    yield Sample(name="64 frequencies, 16400 tokens", kwargs=kwargs)


def linear(draw: Draw) -> Iterator[Sample]:
    """Yield rows past 8,192, results past 8,192, and more than 2**20 results."""
    for rows, width, outputs in ((3, 8704, 40), (3, 40, 8704), (65, 24, 16_512)):
        call = {"x": draw(rows, width), "weight": draw(outputs, width, scale=width**-0.5), "bias": draw(outputs)}
        yield Sample(name=f"{_title(rows, width)}, {outputs} out", kwargs=call)


def gated_linear(draw: Draw) -> Iterator[Sample]:
    """Yield rows past 8,192, and as many results."""
    for rows, width, outputs in ((3, 8704, 40), (3, 40, 8704)):
        weight = draw(2 * outputs, width, scale=width**-0.5)
        call = {"x": draw(rows, width), "weight": weight, "bias": None, "kind": "silu"}
        yield Sample(name=f"{_title(rows, width)}, {outputs} out", kwargs=call)


def moe_route(draw: Draw) -> Iterator[Sample]:
    """Yield 16,400 tokens for 64 experts."""
    yield Sample(name="64 experts, 16400 tokens", kwargs={"logits": draw(16_400, 64), "top_k": 4, "renormalize": True})


def grouped_mlp(draw: Draw) -> Iterator[Sample]:
    """Yield 8,200 tokens, one of four experts for each."""
    experts, size, inner, num_tokens = 4, 128, 16, 8200
    kwargs = {
        "x": draw(num_tokens, size),
        "weights": draw(num_tokens, 1).sigmoid(),
        "indices": draw(num_tokens, experts, dtype=torch.float64).argsort(-1)[:, :1],
        "gate_up": draw(experts, 2 * inner, size, scale=size**-0.5),
        "down": draw(experts, size, inner, scale=inner**-0.5),
        "kind": "silu",
    }
    yield Sample(name="4 experts, 8200 tokens", kwargs=kwargs)


def quantize(draw: Draw) -> Iterator[Sample]:
    """Yield int8 by token and fp8 by group, one per shape."""
    forms = ((torch.int8, "token", 0), (torch.float8_e4m3fn, "group", 128))
    for (code, granularity, size), shape in zip(forms, SHAPES, strict=True):
        options = {"dtype": code, "granularity": granularity, "group_size": size}
        name = f"{str(code).removeprefix('torch.')} by {granularity}, {_title(*shape)}"
        yield Sample(name=name, kwargs={"x": draw(*shape, scale=3.0), "scale": None, **options})


def quantize_asymmetric(draw: Draw) -> Iterator[Sample]:
    """Yield one-sided rows, one call per shape."""
    for rows, width in SHAPES:
        given = {"scale": None, "zero_point": None, "dtype": torch.int8}
        yield Sample(name=_title(rows, width), kwargs={"x": draw(rows, width, scale=2.0, shift=1.0), **given})


def quantize_fp4(draw: Draw) -> Iterator[Sample]:
    """Yield one call per shape."""
    for rows, width in SHAPES:
        yield Sample(name=_title(rows, width), kwargs={"x": draw(rows, width, scale=3.0), "scale": None})


def quantized_linear(draw: Draw) -> Iterator[Sample]:
    """Yield rows past 8,192, and results past 8,192; scales by token and channel."""
    wide = at_least_fp32(draw.dtype)
    for width, outputs in ((8704, 40), (64, 8704)):
        pairs = [draw(rows, width, scale=40.0, dtype=torch.float32) for rows in (3, outputs)]
        codes = [values.clamp(-127, 127).to(torch.int8) for values in pairs]
        scales = [draw(rows, 1, scale=0.0002, shift=0.001, dtype=wide) for rows in (3, outputs)]
        call = {"x_codes": codes[0], "x_scale": scales[0], "w_codes": codes[1], "w_scale": scales[1]}
        title = f"int8, {_title(3, width)}, {outputs} out"
        yield Sample(name=title, kwargs={**call, "bias": draw(outputs), "out_dtype": draw.dtype})


def weight_only_linear(draw: Draw) -> Iterator[Sample]:
    """Yield rows past 8,192."""
    yield from quantised_weights(draw, 3, 8704, 40)


def quantized_grouped_linear(draw: Draw) -> Iterator[Sample]:
    """Yield experts of rows past 8,192."""
    yield from of_experts(draw, (2, 0, 1), 8704, 8)


def sample(draw: Draw) -> Iterator[Sample]:
    """Yield rows of more than 16,384 logits, which take the largest, or draw one, in turn."""
    rows, width = SHAPES[1]
    params = torch.tensor([[0.0, 0.0, 1.0, 0.5], [0.7, 50.0, 1.0, 0.3]])[torch.arange(rows) % 2]
    kwargs = {"logits": draw(rows, width, scale=2.5), "sampling_params": params.to(draw.device)}
    yield Sample(name=_title(rows, width), kwargs=kwargs)


def argmax(draw: Draw) -> Iterator[Sample]:
    """Yield a vocabulary past 16,384, the largest logit of most rows in its last columns."""
    rows, width = SHAPES[1]
    logits = draw(rows, width)
    logits[::2, -40:] += 9
    yield Sample(name=f"{_title(rows, width)}, the largest near the end", kwargs={"logits": logits})


def _with(name: str, make: Callable[[Draw, Tensor], Tensor]) -> Callable[[Draw, dict[str, Any]], dict[str, Any]]:
    return lambda draw, call: {**call, name: make(draw, call["x"])}


WIDE: Mapping[str, Calls] = MappingProxyType(
    with_derived(
        {
            "attention": paged_attention_far,
            "dense_attention": dense_attention_far,
            "rms_norm": rms_norm,
            "add_rms_norm": changed(rms_norm, _with("residual", lambda draw, x: draw(*x.shape))),
            "layer_norm": changed(rms_norm, _with("bias", lambda draw, x: draw(x.shape[-1]))),
            "gated_activation": gated_activation,
            "rotary": rotary,
            "qk_norm_rotary": qk_norm_rotary,
            "rotary_table": rotary_table,
            "linear": linear,
            "gated_linear": gated_linear,
            "add_lora": lora_wide,
            "moe_route": moe_route,
            "grouped_mlp": grouped_mlp,
            "quantize": quantize,
            "quantized_linear": quantized_linear,
            "quantize_asymmetric": quantize_asymmetric,
            "weight_only_linear": weight_only_linear,
            "quantized_grouped_linear": quantized_grouped_linear,
            "quantize_fp4": quantize_fp4,
            "sample": sample,
            "argmax": argmax,
        }
    )
    | dict(recurrent.WIDE)
)
"""Name of an op -> its widest and longest calls."""
