"""`core::quantize` for fp8 and int8, and the parts that all quantising kernels share."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.quantize.symmetric import QUANTIZE
from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rows import TYPES, as_rows, outputs, row_starts

MAX_WIDTH = 32768
"""The longest row that a program holds in registers; longer ones are read twice."""

_PARTS = 1024  # parts of a whole tensor that one step of the last program takes


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeConfig:
    """How rows are shared out among programs."""

    #: rows that a program takes
    rows: int
    num_warps: int


def default_config(num_rows: int, width: int) -> QuantizeConfig:
    """Return how rows of this width are shared out: about 16 values to a thread, a few narrow rows to a program."""
    block = min(triton.next_power_of_2(width), MAX_WIDTH)
    per_program = max(1, min(1024 // block, num_rows // (2 * launching.num_multiprocessors())))
    rows = 1 << (per_program.bit_length() - 1)
    return QuantizeConfig(rows=rows, num_warps=min(max(rows * block // 512, 1), 16))


def candidates(num_rows: int, width: int) -> Iterator[QuantizeConfig]:
    """Yield the configurations worth measuring for rows of this width."""
    block = min(triton.next_power_of_2(width), MAX_WIDTH)
    for rows in (1, 2, 4, 8, 16):
        for num_warps in (1, 2, 4, 8, 16, 32):
            if rows <= num_rows and 4 <= rows * block // (32 * num_warps) <= 64:
                yield QuantizeConfig(rows=rows, num_warps=num_warps)


@triton.jit
def largest(values, AXIS: tl.constexpr = 1):
    """Return the largest absolute values, (rows, columns) -> (rows,), or along another axis; NaN if there is one."""
    # As integers, the bits of positive numbers are in the order of the numbers, and NaN lies above infinity.
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(largest_value, CODE: tl.constexpr):
    """Return the scale for codes of dtype CODE, as `core::quantize` makes it of the largest absolute value."""
    scale = tl.div_rn(largest_value, 127.0 if CODE.is_int8() else 448.0)
    return tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)


@triton.jit
def _quotient(values, scale, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return values / scale, cut off at a range. NaN stays NaN.

    A product with the reciprocal and one correction give the rounded quotient (Markstein, 1990) at a third of a
    division's instructions; the reciprocal is taken once where one scale serves many values.
    """
    inverse = tl.div_rn(1.0, scale)
    near = values * inverse
    quotient = tl.fma(tl.fma(-near, scale, values), inverse, near)
    quotient = tl.where(quotient == quotient, quotient, near)  # the correction makes NaN where one of them is infinite
    return tl.where(quotient > HIGH, HIGH, tl.where(quotient < LOW, LOW, quotient))


@triton.jit
def to_codes(values, scale, CODE: tl.constexpr):
    """Return values / scale as codes of dtype CODE: cut off at its range, to nearest even. NaN stays NaN in fp8."""
    if CODE.is_int8():
        # 1.5 * 2**23: at this size fp32 holds integers only, so that the addition rounds.
        codes = ((_quotient(values, scale, -128.0, 127.0) + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        codes = _quotient(values, scale, -448.0, 448.0).to(CODE)
    return codes


@triton.jit
def to_numbers(values, scale):
    """Return what the codes of e4m3 of values / scale stand for, fp32.

    Not by converting the codes back: where a thread has 4 or 8 of them, Triton 3.6 on an H200 gave wrong numbers for
    the first two of each four.
    """
    quotient = _quotient(values, scale, -448.0, 448.0)
    bits = quotient.to(tl.int32, bitcast=True)
    # To three bits behind the point, to nearest even; below 2**-6 codes are 2**-9 apart, which 1.5 * 2**14 rounds to.
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    rounded = tl.where(tl.abs(quotient) < 0.015625, (quotient + 24576.0) - 24576.0, rounded)
    return tl.where(quotient == quotient, rounded, quotient)


@triton.jit
def _rows_kernel(
    x, given, codes, scale, num_rows, inner, x_outer, x_inner, given_outer, given_inner, codes_outer, codes_inner,
    scale_outer, scale_inner, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FLAT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One scale for each row of WIDTH, made or given. codes (rows, WIDTH), scale (rows, 1)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    present = row < num_rows
    from_x = x + row_starts(row, inner, x_outer, x_inner, FLAT)[:, None]
    to = codes + row_starts(row, inner, codes_outer, codes_inner, FLAT)[:, None]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    mask = present[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(from_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if given is not None:
        begin = row_starts(row, inner, given_outer, given_inner, FLAT)
        used = tl.load(given + begin, mask=present, other=1.0).to(tl.float32)
    else:
        top = largest(values)
        for start in range(BLOCK, WIDTH, BLOCK):
            more = present[:, None] & (start + columns < WIDTH)[None, :]
            further = tl.load(from_x + start + columns[None, :], mask=more, other=0.0).to(tl.float32)
            top = _larger(top, largest(further))
        used = scale_of(top, codes.dtype.element_ty)
    if scale is not None:
        tl.store(scale + row_starts(row, inner, scale_outer, scale_inner, FLAT), used, mask=present)
    tl.store(to + columns[None, :], to_codes(values, used[:, None], codes.dtype.element_ty), mask=mask)
    for start in range(BLOCK, WIDTH, BLOCK):
        mask = present[:, None] & (start + columns < WIDTH)[None, :]
        values = tl.load(from_x + start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(to + start + columns[None, :], to_codes(values, used[:, None], codes.dtype.element_ty), mask=mask)


@triton.jit
def _larger(a, b):
    """Return the larger of numbers from zero; NaN if either is."""
    return tl.maximum(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _parts_kernel(
    x, parts, num_rows, inner, x_outer, x_inner, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FLAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The largest absolute value of ROWS rows, to one place of `parts` for each program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    from_x = x + row_starts(row, inner, x_outer, x_inner, FLAT)[:, None]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    top = tl.zeros((ROWS,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        mask = (row < num_rows)[:, None] & (start + columns < WIDTH)[None, :]
        values = tl.load(from_x + start + columns[None, :], mask=mask, other=0.0)
        top = _larger(top, largest(values.to(tl.float32)))
    tl.store(parts + tl.program_id(0), largest(top, 0))


@triton.jit
def _whole_scale_kernel(parts, scale, num_parts, CODE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """The scale of a whole tensor from the largest values of its parts."""
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    place = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_parts, BLOCK):
        top = _larger(top, tl.load(parts + start + place, mask=start + place < num_parts, other=0.0))
    tl.store(scale, scale_of(largest(top, 0), CODE))


@kernel_of(QUANTIZE)
def quantize(x: Tensor, scale: Tensor | None, group_size: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Quantise; a group is a short row, and a scale of its own for the whole tensor takes two more launches."""
    codes, used = outputs(QUANTIZE, {"x": x, "scale": scale, "group_size": group_size, **options}, x.device)
    Codes(scale, used, group_size).quantize(x, codes)
    return codes, used


@dataclass(frozen=True, slots=True)
class Codes:
    """The scales of the codes in which a kernel ends; without any, it ends in no codes."""

    #: the scales to use; None where the kernel makes them
    given: Tensor | None = None
    #: where the scales used are written
    used: Tensor | None = None
    #: how many neighbours in a row share a scale; 0 where rows, or all of them, do
    group: int = 0

    @property
    def made(self) -> Tensor | None:
        """Where a kernel puts the scales that it makes of rows or groups; None where it makes none."""
        return self.used if self.given is None else None

    @property
    def arguments(self) -> dict[str, Any]:
        """The kernels' arguments about scales, besides the rows of the scales that they compute."""
        return {"given": self.given, "GROUP": self.group} | ({} if self.given is None else {"scale": self.used})

    def fill(self, codes: Tensor) -> None:
        """Copy a given scale where no kernel has been launched, there being no rows."""
        if self.given is not None and self.used is not None and not codes.numel():
            self.used.copy_(self.given)

    def quantize(self, x: Tensor, codes: Tensor) -> None:
        """Write the codes of x (..., D) to `codes` (..., D), in launches of their own."""
        assert self.used is not None
        if self.group:
            rows = [t.unflatten(-1, (-1, self.group)) for t in (x, codes)]
            given = None if self.given is None else self.given[..., None]
            quantize_rows(rows[0], given, rows[1], self.used[..., None])
        else:
            quantize_rows(x, self.given, codes, self.used)


def quantize_rows(
    x: Tensor, scale: Tensor | None, codes: Tensor, used: Tensor, config: QuantizeConfig | None = None
) -> None:
    """Write the codes of x (..., D) to `codes` (..., D), and the scale they have, fp32, to `used` (..., 1) or ().

    scale: of the shape of `used`, or None to make one: for each row, or for all of x where `used` is ().
    """
    width = x.shape[-1]
    if used.dim():
        rows = as_rows({"x": x, "given": scale}, {"codes": codes, "scale": used})
    else:
        if scale is None:
            _whole_scale(x, used, codes.dtype)
        else:
            used.copy_(scale)
        rows = as_rows({"x": x, "given": used.expand(*x.shape[:-1], 1), "scale": None}, {"codes": codes})
    config = config or default_config(rows.count, width)
    grid = (triton.cdiv(rows.count, config.rows),)
    launching.launch(_rows_kernel, grid, **rows.arguments, **_constants(width, config))
    rows.flush()


def _whole_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    rows = as_rows({"x": x}, {})
    width = x.shape[-1]
    config = default_config(rows.count, width)
    num_parts = triton.cdiv(rows.count, config.rows)
    parts = torch.empty(num_parts, dtype=torch.float32, device=x.device)
    launching.launch(_parts_kernel, (num_parts,), **rows.arguments, parts=parts, **_constants(width, config))
    launching.launch(_whole_scale_kernel, (1,), parts, scale, num_parts, CODE=TYPES[dtype], BLOCK=_PARTS)


def _constants(width: int, config: QuantizeConfig) -> dict[str, int]:
    block = min(triton.next_power_of_2(width), MAX_WIDTH)
    return {"WIDTH": width, "BLOCK": block, "ROWS": config.rows, "num_warps": config.num_warps}
