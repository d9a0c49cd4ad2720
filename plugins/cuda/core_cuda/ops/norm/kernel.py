"""The kernels of norms over rows: RMSNorm and layer norm, a sum before and codes after them if wanted.

RMSNorm is Zhang and Sennrich, arXiv 1910.07467; layer norm is Ba et al., arXiv 1607.06450. `core::rms_norm` says where
values are rounded.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.launching import fetch, start_next, wait_for_inputs
from core_cuda.ops.quantize import largest, scale_of, to_codes
from core_cuda.ops.rows import row_starts


@triton.jit
def per_column(weight, columns, mask, OFFSET: tl.constexpr, FACTOR: tl.constexpr):
    """Return the weight with its offset, rounded to FACTOR at each step, fp32 (1, columns)."""
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(FACTOR).to(tl.float32)
    if OFFSET != 0.0:
        factor = (factor + OFFSET).to(FACTOR).to(tl.float32)
    return factor[None, :]


@triton.jit
def fetch_columns(weight, WIDTH: tl.constexpr):
    """Fetch a weight into the L2 cache; a model may compute it in the kernel before this one, so it is read later."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # 128 bytes
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(WIDTH, LINE))
    fetch(weight + tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1))


@triton.jit
def _summed(x, residual, total, x_at, residual_at, total_at, mask, STORE: tl.constexpr):
    """Return x, or its sum with the residual, which is stored if STORE; fp32."""
    values = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + residual_at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        if STORE:
            tl.store(total + total_at, rounded, mask=mask)
        values = rounded.to(tl.float32)
    return values


@triton.jit
def scaled(normed, factor, shift, NORMED: tl.constexpr, PRODUCT: tl.constexpr, STORED: tl.constexpr):
    """Return the normalised rows times factor plus shift, either None, as they are stored without codes; fp32."""
    normed = normed.to(NORMED).to(tl.float32)
    if factor is not None:
        normed = (normed * factor).to(PRODUCT).to(tl.float32)
    if shift is not None:
        normed += shift
    return normed.to(STORED).to(tl.float32)


@triton.jit
def norm_kernel(
    x, residual, out, total, scale, weight, bias, given, num_rows, inner, x_outer, x_inner, residual_outer,
    residual_inner, out_outer, out_inner, total_outer, total_inner, scale_outer, scale_inner, eps,
    OFFSET: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTER: tl.constexpr,
    NORMED: tl.constexpr, FACTOR: tl.constexpr, PRODUCT: tl.constexpr, STORED: tl.constexpr, EARLY: tl.constexpr,
    GROUP: tl.constexpr, FLAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of WIDTH up to BLOCK, held in registers. EARLY: the weight is read with the rows, not after them.

    residual (rows, WIDTH): None, or added to x first, the sum going to `total`. CENTER: layer norm. out: what the op
    stores, or codes, if there is a scale: `given` () and copied to `scale` (), or made and stored in `scale`: of each
    row, (rows, 1), or of GROUP neighbours, a power of two that divides WIDTH, (rows, WIDTH / GROUP).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    present = row < num_rows
    mask = present[:, None] & inside[None, :]
    x_at = row_starts(row, inner, x_outer, x_inner, FLAT)[:, None] + columns[None, :]
    residual_at = row_starts(row, inner, residual_outer, residual_inner, FLAT)[:, None] + columns[None, :]
    total_at = row_starts(row, inner, total_outer, total_inner, FLAT)[:, None] + columns[None, :]
    out_at = row_starts(row, inner, out_outer, out_inner, FLAT)[:, None] + columns[None, :]
    factor = None
    shift = None
    if OVERLAP:  # noqa: SIM102  a constant of the compiler, decided before the other condition is looked at
        if tl.program_id(0) == 0:  # one for all: as many fetches as there are rows took longer than the rows
            if weight is not None:
                fetch_columns(weight, WIDTH)
            if bias is not None:
                fetch_columns(bias, WIDTH)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    if EARLY:
        if weight is not None:
            factor = per_column(weight, columns, inside, OFFSET, FACTOR)
        if bias is not None:
            shift = per_column(bias, columns, inside, 0.0, FACTOR)
    values = _summed(x, residual, total, x_at, residual_at, total_at, mask, True)
    if CENTER:
        values = tl.where(mask, values - (tl.sum(values, axis=1) / WIDTH)[:, None], 0.0)
    deviation = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)
    if not EARLY:
        if weight is not None:
            factor = per_column(weight, columns, inside, OFFSET, FACTOR)
        if bias is not None:
            shift = per_column(bias, columns, inside, 0.0, FACTOR)
    result = scaled(values * deviation[:, None], factor, shift, NORMED, PRODUCT, STORED)
    if given is not None:
        whole = tl.load(given).to(tl.float32)
        tl.store(scale, whole, mask=tl.program_id(0) == 0)
        result = to_codes(result, whole, out.dtype.element_ty)
    elif GROUP > 0:
        groups = tl.arange(0, BLOCK // GROUP)
        result = tl.reshape(tl.where(mask, result, 0.0), (ROWS, BLOCK // GROUP, GROUP))
        each = scale_of(largest(result, 2), out.dtype.element_ty)
        scale_at = row_starts(row, inner, scale_outer, scale_inner, FLAT)[:, None] + groups[None, :]
        tl.store(scale + scale_at, each, mask=present[:, None] & (groups < WIDTH // GROUP)[None, :])
        result = tl.reshape(to_codes(result, each[:, :, None], out.dtype.element_ty), (ROWS, BLOCK))
    elif scale is not None:
        used = scale_of(largest(tl.where(mask, result, 0.0)), out.dtype.element_ty)
        tl.store(scale + row_starts(row, inner, scale_outer, scale_inner, FLAT), used, mask=present)
        result = to_codes(result, used[:, None], out.dtype.element_ty)
    tl.store(out + out_at, result, mask=mask)


@triton.jit
def long_norm_kernel(
    x, residual, out, total, weight, bias, num_rows, inner, x_outer, x_inner, residual_outer, residual_inner,
    out_outer, out_inner, total_outer, total_inner, eps, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, CENTER: tl.constexpr, NORMED: tl.constexpr, FACTOR: tl.constexpr, PRODUCT: tl.constexpr,
    STORED: tl.constexpr, FLAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The same without codes for rows that registers cannot hold: one row to a program, read for each quantity."""
    row = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK)
    x_at = row_starts(row, inner, x_outer, x_inner, FLAT)[:, None] + columns[None, :]
    residual_at = row_starts(row, inner, residual_outer, residual_inner, FLAT)[:, None] + columns[None, :]
    total_at = row_starts(row, inner, total_outer, total_inner, FLAT)[:, None] + columns[None, :]
    out_at = row_starts(row, inner, out_outer, out_inner, FLAT)[:, None] + columns[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    mean = tl.zeros((1,), tl.float32)
    if CENTER:
        for c in range(0, WIDTH, BLOCK):
            inside = (c + columns < WIDTH)[None, :]
            values = _summed(x, residual, total, x_at + c, residual_at + c, total_at + c, inside, False)
            mean += tl.sum(values, axis=1) / WIDTH
    squares = tl.zeros((1,), tl.float32)
    for c in range(0, WIDTH, BLOCK):
        inside = (c + columns < WIDTH)[None, :]
        values = _summed(x, residual, total, x_at + c, residual_at + c, total_at + c, inside, True)
        values = tl.where(inside, values - mean[:, None], 0.0)
        squares += tl.sum(values * values, axis=1)
    deviation = tl.rsqrt(squares / WIDTH + eps)[:, None]
    for c in range(0, WIDTH, BLOCK):
        inside = c + columns < WIDTH
        values = _summed(x, residual, total, x_at + c, residual_at + c, total_at + c, inside[None, :], False)
        factor = None
        shift = None
        if weight is not None:
            factor = per_column(weight, c + columns, inside, OFFSET, FACTOR)
        if bias is not None:
            shift = per_column(bias, c + columns, inside, 0.0, FACTOR)
        result = scaled((values - mean[:, None]) * deviation, factor, shift, NORMED, PRODUCT, STORED)
        tl.store(out + out_at + c, result, mask=inside[None, :])
