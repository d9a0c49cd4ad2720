"""Larger calls of linears: plain, with a gate, of quantised weights and values, of experts. See `opcalls.calls`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import Sample
from core.common.ops.linear.lora import lora_call


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


_INT8, _FP8 = torch.int8, torch.float8_e4m3fn


def asymmetric(draw: Draw) -> Iterator[Sample]:
    """Yield one-sided rows of 1024, by token and by tensor."""
    for granularity in ("token", "tensor"):
        given = {"scale": None, "zero_point": None, "dtype": _INT8, "granularity": granularity}
        yield Sample(name=f"1024 wide, by {granularity}", kwargs={"x": draw(33, 1024, scale=2.0, shift=1.0), **given})


def asymmetric_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield odd rows past the tiles, dynamic and with a scale."""
    dynamic = {"scale": None, "zero_point": None, "dtype": _INT8}
    yield Sample(name="129 rows of 1000", kwargs={"x": draw(129, 1000, scale=3.0), **dynamic})
    yield Sample(name="65 rows of 4097", kwargs={"x": draw(65, 4097, shift=2.0), **dynamic})
    given = {"scale": _scale(draw), "zero_point": _codes(draw, _INT8), "dtype": _INT8, "granularity": "tensor"}
    yield Sample(name="given scale, 65 rows of 1001", kwargs={"x": draw(65, 1001, scale=0.5), **given})


def weight_only(draw: Draw) -> Iterator[Sample]:
    """Yield 1024 in, 96 out: 4 bits by group of 128, int8 by row, fp8."""
    yield from quantised_weights(draw, 33, 1024, 96)


def weight_only_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield 4096 in, 130 out, of one row, of 17 and of 65."""
    for rows in (1, 17, 65):
        yield from quantised_weights(draw, rows, 4096, 130)


def quantised_weights(draw: Draw, rows: int, inputs: int, outputs: int) -> Iterator[Sample]:
    """Yield a call for each format of weights."""
    for name, weight in _weights(draw, (outputs,), inputs).items():
        given = {"x": draw(rows, inputs, scale=inputs**-0.5), "bias": draw(outputs), **weight}
        yield Sample(name=f"{name}, {rows} rows of {inputs}", kwargs=given)


def grouped(draw: Draw) -> Iterator[Sample]:
    """Yield eight experts, some without rows: codes of both formats, values and weights of 4 bits."""
    yield from of_experts(draw, (0, 5, 1, 0, 17, 9, 0, 1), 128, 64)


def grouped_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield experts with 0 to 130 rows, of 512 inputs and 136 outputs."""
    yield from of_experts(draw, (130, 0, 17, 64, 1), 512, 136)


def of_experts(draw: Draw, counts: tuple[int, ...], inputs: int, outputs: int) -> Iterator[Sample]:
    """Yield a call for each format of rows and weights. counts: rows of each expert."""
    ends = torch.tensor(counts).cumsum(0).to(draw.device, torch.int32)
    rows = sum(counts) + 2  # two of no expert
    for code in (_INT8, _FP8):
        call: dict[str, Any] = {"x": _codes(draw, code, rows, inputs), "x_scale": _scale(draw, rows, 1), "ends": ends}
        call |= {"w_codes": _codes(draw, code, len(counts), outputs, inputs), "out_dtype": draw.dtype}
        call |= {"w_scale": _scale(draw, len(counts), outputs, 1), "w_zero_point": None}
        yield Sample(name=f"{str(code).removeprefix('torch.')}, {rows} rows of {inputs}", kwargs=call)
    for name, weight in _weights(draw, (len(counts), outputs), inputs).items():
        values = {"x": draw(rows, inputs), "x_scale": None, "ends": ends, "out_dtype": draw.dtype}
        yield Sample(name=f"{name}, {rows} rows of {inputs} as values", kwargs={**values, **weight})


def _weights(draw: Draw, shape: tuple[int, ...], inputs: int) -> dict[str, dict[str, Any]]:
    """Return weights (*shape, inputs) in every format."""
    groups = inputs // 64
    words = (draw(*shape, inputs // 8, dtype=torch.float64) * 2**29).to(torch.int32)
    four = {"w_codes": words, "w_scale": _scale(draw, *shape, groups), "num_bits": 4}
    zeros = draw(*shape, groups, scale=3.0, dtype=torch.float32).to(_INT8)
    eight = {"w_scale": _scale(draw, *shape, 1), "w_zero_point": None, "num_bits": 8}
    return {
        "int4 by group": {**four, "w_zero_point": None},
        "int4 by group, zero points": {**four, "w_zero_point": zeros},
        "int8 by row": {**eight, "w_codes": _codes(draw, _INT8, *shape, inputs)},
        "fp8 by row": {**eight, "w_codes": _codes(draw, _FP8, *shape, inputs)},
    }


def _codes(draw: Draw, code: torch.dtype, *shape: int) -> Tensor:
    return draw(*shape, scale=40.0, dtype=torch.float32).clamp(-127, 127).to(code)


def _scale(draw: Draw, *shape: int) -> Tensor:
    return draw(*shape, scale=0.002, shift=0.01, dtype=at_least_fp32(draw.dtype))


def lora(draw: Draw) -> Iterator[Sample]:
    """Yield adapters of rank 16 on 1024 in, on one layer and on three, for several rows and for one."""
    yield _adapted(draw, 9, 1024, (96,), 4, 16)
    yield _adapted(draw, 1, 1024, (64, 32, 32), 4, 16)
    yield _adapted(draw, 70, 1024, (48, 48), 4, 16)


def lora_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield rows, widths, results and ranks past usual tiles, in each of which the last tile is not full."""
    yield _adapted(draw, 129, 1000, (257,), 9, 8)
    yield _adapted(draw, 65, 1001, (130, 66), 2, 33)
    yield _adapted(draw, 33, 4096, (66,), 3, 64)
    yield _adapted(draw, 300, 520, (70, 20, 20, 10, 30), 4, 16)


def lora_wide(draw: Draw) -> Iterator[Sample]:
    """Yield rows past 8,192, results past 8,192, and more than 2**20 results."""
    for rows, width, outputs in ((3, 8704, 40), (3, 40, 8704), (65, 24, 16_512)):
        yield _adapted(draw, rows, width, (outputs,), 2, 4)


def _adapted(draw: Draw, rows: int, width: int, sizes: tuple[int, ...], num_slots: int, rank: int) -> Sample:
    call = lora_call(draw, (rows,), width, sizes, num_slots=num_slots, rank=rank)
    outputs = " and ".join(map(str, sizes))
    return Sample(name=f"{rows} rows of {width}, {outputs} out, {num_slots} of rank {rank}", kwargs=call)


def quantize_fp4(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024, with a scale and without."""
    given = draw(scale=0.0002, shift=0.002, dtype=at_least_fp32(draw.dtype))
    yield Sample(name="1024 wide", kwargs={"x": draw(9, 1024, scale=3.0), "scale": None})
    yield Sample(name="1024 wide, given scale", kwargs={"x": draw(9, 1024, scale=3.0), "scale": given})


def quantize_fp4_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield odd numbers of rows past the tiles, of an odd number of groups, with a scale and without."""
    given = draw(scale=0.0002, shift=0.002, dtype=at_least_fp32(draw.dtype))
    yield Sample(name="129 rows of 1008", kwargs={"x": draw(129, 1008, scale=3.0), "scale": None})
    yield Sample(name="65 rows of 4112, given scale", kwargs={"x": draw(65, 4112, scale=3.0), "scale": given})
