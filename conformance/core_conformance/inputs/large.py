"""Calls of canonical ops with sizes as models have them, for the suite alone: see `opcalls.calls`.

Each op's first call is the one that comes again with other strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import Sample
from core.common.ops.rotary.table import inverse_frequencies
from core_conformance.inputs import large_linears as linears
from core_conformance.inputs import large_recurrent as recurrent
from core_conformance.inputs.large_attention import dense_attention, paged_attention
from core_conformance.inputs.large_derived import Calls, in_codes, tables, with_derived
from core_conformance.inputs.large_sampling import most_likely, sampled

_ROWS, _WIDTH = 9, 1024


def _norm_options(draw: Draw) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield name, scale of x, and the further arguments of rms_norm and add_rms_norm."""
    weight, wide = draw(_WIDTH, scale=0.4, shift=1.0), at_least_fp32(draw.dtype)
    yield "1024 wide", 1.0, {"weight": weight, "eps": 1e-5}
    yield "1024 wide, rounded before the weight", 1.0, {"weight": weight, "eps": 1e-6, "normed_dtype": draw.dtype}
    yield "1024 wide, eps as large as the mean square", 3e-3, {"weight": weight, "eps": 1e-5}
    # Intermediate roundings show only if the result itself is not rounded.
    yield "1024 wide, result kept wide", 1.0, {"weight": weight, "eps": 1e-6, "out_dtype": wide}


def rms_norm(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024."""
    for name, scale, options in _norm_options(draw):
        yield Sample(name=name, kwargs={"x": draw(_ROWS, _WIDTH, scale=scale), **options})


def add_rms_norm(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024."""
    for name, scale, options in _norm_options(draw):
        x, residual = draw(_ROWS, _WIDTH, scale=scale), draw(_ROWS, _WIDTH, scale=scale)
        yield Sample(name=name, kwargs={"x": x, "residual": residual, **options})


def layer_norm(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024, around zero and far from it."""
    weight, bias, wide = draw(_WIDTH, scale=0.4, shift=1.0), draw(_WIDTH), at_least_fp32(draw.dtype)
    options: dict[str, Any] = {"weight": weight, "bias": bias, "eps": 1e-5}
    yield Sample(name="1024 wide", kwargs={"x": draw(_ROWS, _WIDTH), **options})
    yield Sample(name="1024 wide, shifted", kwargs={"x": draw(_ROWS, _WIDTH, shift=4.0), **options})
    small = draw(_ROWS, _WIDTH, scale=3e-3)
    yield Sample(name="1024 wide, eps as large as the variance", kwargs={"x": small, **options})
    yield Sample(name="1024 wide, result kept wide", kwargs={"x": draw(_ROWS, _WIDTH), **options, "out_dtype": wide})


def gated_activation(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024, and gates in the left tail of GELU."""
    for kind in ("silu", "gelu", "gelu_tanh"):
        call = {"gate": draw(_ROWS, _WIDTH, scale=2.0), "up": draw(_ROWS, _WIDTH), "kind": kind}
        yield Sample(name=f"{kind}, 1024 wide", kwargs=call)
    for kind in ("gelu", "gelu_tanh") if draw.dtype != torch.float32 else ():
        # There the two forms differ by a tenth, which half precision can't hide; in fp32 both cancel there.
        tail = torch.linspace(-4.5, -3.0, 2 * _WIDTH, dtype=torch.float64).view(2, _WIDTH)
        call = {"gate": tail.to(draw.dtype).to(draw.device), "up": draw(2, _WIDTH, scale=0.2, shift=1.0), "kind": kind}
        yield Sample(name=f"{kind}, left tail", kwargs=call)


def heads(draw: Draw, num_tokens: int, size: int, counts: tuple[int, int] = (8, 2)) -> dict[str, Tensor]:
    """Return query (2, H, T, D) and key (2, K, T, D), strided as projections leave them. counts: H and K."""
    named = zip(("query", "key"), counts, strict=True)
    return {name: draw(2, num_tokens, count, size).transpose(1, 2) for name, count in named}


def head_tables(draw: Draw, width: int, num_tokens: int) -> dict[str, Tensor]:
    """Return cos and sin (1, 1, T, width)."""
    return {name: values[None, None] for name, values in tables(draw, width, num_tokens).items()}


def rotary(draw: Draw) -> Iterator[Sample]:
    """Yield heads of 64 and 128, tables of either width, and a part of the head rotated."""
    yield Sample(name="heads of 64", kwargs={**heads(draw, 9, 64), **head_tables(draw, 64, 9)})
    pairs: dict[str, Any] = {"style": "interleaved"}
    yield Sample(name="heads of 128, interleaved", kwargs={**heads(draw, 9, 128), **head_tables(draw, 64, 9), **pairs})
    part: dict[str, Any] = {"rotary_dim": 32}
    yield Sample(name="heads of 128, 32 rotated", kwargs={**heads(draw, 9, 128), **head_tables(draw, 32, 9), **part})


def qk_norm_rotary(draw: Draw) -> Iterator[Sample]:
    """Yield heads of 64 and 128, one of them with values so small that eps counts."""
    for size, scale in ((128, 1.0), (64, 3e-3)):
        weights = {name: draw(size, scale=0.4, shift=1.0) for name in ("query_weight", "key_weight")}
        rows = {name: tensor * scale for name, tensor in heads(draw, 9, size).items()}
        name = f"heads of {size}" + ("" if scale == 1.0 else ", eps as large as the mean square")
        yield Sample(name=name, kwargs={**rows, **weights, **head_tables(draw, size, 9), "eps": 1e-5})


def rotary_table(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 64 frequencies: positions in order, and from all over a long context."""
    frequencies = inverse_frequencies(64, draw.dtype, draw.device, base=500_000.0)
    starts = {"from 1000 on": (1000, 1), "up to 131072": (72, 7280)}
    for name, (first, step) in starts.items():
        positions = torch.arange(first, first + 18 * step, step, device=draw.device).view(2, 9)
        kwargs = {"positions": positions, "inv_freq": frequencies, "scaling": 0.9, "out_dtype": draw.dtype}
        yield Sample(name=f"64 frequencies, {name}", kwargs=kwargs)


def moe_route(draw: Draw) -> Iterator[Sample]:
    """Yield routers of 64 experts on random logits, which in half precision have ties."""
    v3 = {"scoring": "sigmoid", "renormalize_eps": 1e-20, "num_groups": 8, "top_groups": 4, "scale": 2.5}
    logits = {"logits": draw(128, 64), "top_k": 8, "renormalize": True}
    yield Sample(name="64 experts", kwargs=logits)
    yield Sample(name="64 experts in groups", kwargs={**logits, **v3, "bias": draw(64, scale=0.2)})


def grouped_mlp(draw: Draw) -> Iterator[Sample]:
    """Yield eight experts, and the same with most tokens at one of them."""
    experts, size, inner, num_tokens = 8, 128, 64, 33
    matrices = {
        "gate_up": draw(experts, 2 * inner, size, scale=size**-0.5),
        "down": draw(experts, size, inner, scale=inner**-0.5),
    }
    for name, ranks in {"8 experts": experts, "8 experts, one of them crowded": 3}.items():
        indices = draw(num_tokens, ranks, dtype=torch.float64).argsort(-1)[:, :2]
        call = {"x": draw(num_tokens, size), "weights": draw(num_tokens, 2).sigmoid(), "indices": indices}
        yield Sample(name=name, kwargs={**call, **matrices, "kind": "silu"})
    up = {"gate_up": draw(experts, inner, size, scale=size**-0.5), "gated": False}
    yield Sample(name="8 experts without a gate", kwargs={**call, **matrices, **up, "kind": "relu2"})


def quantize(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024 for each format and granularity."""
    for code in (torch.int8, torch.float8_e4m3fn):
        for granularity, size in (("token", 0), ("tensor", 0), ("group", 128)):
            name = f"1024 wide, {str(code).removeprefix('torch.')} by {granularity}"
            options = {"dtype": code, "granularity": granularity, "group_size": size}
            yield Sample(name=name, kwargs={"x": draw(_ROWS, _WIDTH, scale=3.0), "scale": None, **options})


def quantized_linear(draw: Draw) -> Iterator[Sample]:
    """Yield 1024 in, both formats: 96 out, scales by token and channel and by group; 128 out, by tensor and block.

    Blocks are of 128 x 128. The last two have no bias: libraries' kernels take none.
    """
    wide = at_least_fp32(draw.dtype)
    forms: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
        "by token": (96, (_ROWS, 1), (96, 1)),
        "by group": (96, (_ROWS, 8), (96, 8)),
        "by tensor": (128, (), ()),
        "by block": (128, (_ROWS, 8), (1, 8)),
    }
    for code in (torch.int8, torch.float8_e4m3fn):
        for name, (columns, *shapes) in forms.items():
            codes = [draw(rows, _WIDTH, scale=40.0, dtype=torch.float32).to(code) for rows in (_ROWS, columns)]
            scales = [draw(*shape, scale=0.002, shift=0.01, dtype=wide) for shape in shapes]
            call = {"x_codes": codes[0], "x_scale": scales[0], "w_codes": codes[1], "w_scale": scales[1]}
            bias = draw(columns) if columns == 96 else None
            title = f"1024 wide, {str(code).removeprefix('torch.')} {name}"
            yield Sample(name=title, kwargs={**call, "bias": bias, "out_dtype": draw.dtype})


def parts(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024, for a collective of the default group."""
    yield Sample(name="1024 wide", kwargs={"x": draw(_ROWS, _WIDTH), "group": ""})


def _grouped(samples: Iterable[Sample], **options: Any) -> Iterator[Sample]:
    """Yield the calls of an op for the op that has a collective of the default group beside it."""
    for sample in samples:
        yield Sample(name=sample.name, kwargs={**sample.kwargs, "group": "", **options})


LARGE: Mapping[str, Calls] = MappingProxyType(
    with_derived(
        {
            "attention": paged_attention,
            "dense_attention": dense_attention,
            "rms_norm": rms_norm,
            "add_rms_norm": add_rms_norm,
            "layer_norm": layer_norm,
            "gated_activation": gated_activation,
            "rotary": rotary,
            "qk_norm_rotary": qk_norm_rotary,
            "rotary_table": rotary_table,
            "linear": linears.linear,
            "gated_linear": linears.gated_linear,
            "add_lora": linears.lora,
            "moe_route": moe_route,
            "grouped_mlp": grouped_mlp,
            "quantize": quantize,
            "quantized_linear": quantized_linear,
            "quantize_asymmetric": linears.asymmetric,
            "weight_only_linear": linears.weight_only,
            "quantized_grouped_linear": linears.grouped,
            "sample": sampled,
            "argmax": most_likely,
            "quantize_fp4": linears.quantize_fp4,
        }
    )
    | dict(recurrent.LARGE)
    | dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "local_shard"), parts)
    | {
        "all_reduce_rms_norm": lambda draw: _grouped(rms_norm(draw)),
        "all_reduce_add_rms_norm": lambda draw: _grouped(add_rms_norm(draw)),
        "all_reduce_add_rms_norm_quantize": lambda draw: _grouped(in_codes(draw, add_rms_norm(draw))),
        "all_reduce_add_rms_norm_quantize_fp4": lambda draw: _grouped(add_rms_norm(draw), scale=None),
        "all_gather_linear": lambda draw: _grouped(linears.linear(draw)),
        "linear_reduce_scatter": lambda draw: _grouped(linears.linear(draw)),
    }
)
"""Name of an op -> its larger calls."""

NON_FINITE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gated_activation": ("gate",),
        "gated_activation_fused": ("gate_up",),
        "argmax": ("logits",),
        **dict.fromkeys(("rotary", "qk_norm_rotary"), ("query", "key")),
        **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "rotary_single"), ("x",)),
        **dict.fromkeys(("linear", "gated_linear", "add_lora", "grouped_mlp"), ("x",)),
        **dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "local_shard"), ("x",)),
        **dict.fromkeys(("all_reduce_rms_norm", "all_reduce_add_rms_norm"), ("x",)),
    }
)
"""Ops whose rows are independent -> arguments in which NaN and infinity must stay in their row, as in eager."""
