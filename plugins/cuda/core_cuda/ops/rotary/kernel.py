"""The kernel of rotary position embedding: query and key in one launch, their norm and the write of the cache included.

Su et al., arXiv 2104.09864; the norm is Zhang and Sennrich, arXiv 1910.07467. `core::rotary` and `core::qk_norm_rotary`
say where values are rounded; between that they are fp32. A pair's two features are held in two tiles, so that each
style reads and writes whole vectors: as two halves of a row, or as a row whose neighbours are parted in registers.
"""
# Triton reads annotations of kernels as types of its own

from __future__ import annotations

import triton
import triton.language as tl

from core_cuda.ops.cache_write import codes_of, write_rows
from core_cuda.ops.launching import start_next, wait_for_inputs


@triton.jit
def _inside(live, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mask of a tile; columns are masked only where the tile is wider than they are."""
    if SIZE == BLOCK:
        return live[:, None]
    else:
        return live[:, None] & (columns < SIZE)[None, :]


@triton.jit
def _load_pairs(rows, live, ADJACENT: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first and the second features of the pairs of rows: neighbours if ADJACENT, else halves of the row."""
    if ADJACENT:
        columns = tl.arange(0, 2 * BLOCK)
        both = tl.load(rows[:, None] + columns[None, :], mask=_inside(live, columns, 2 * PAIRS, 2 * BLOCK), other=0.0)
        return tl.split(tl.reshape(both, (rows.shape[0], BLOCK, 2)))
    else:
        columns = tl.arange(0, BLOCK)
        mask = _inside(live, columns, PAIRS, BLOCK)
        first = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)
        return first, tl.load(rows[:, None] + PAIRS + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_pairs(rows, live, first, second, ADJACENT: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Store what `_load_pairs` would return."""
    first, second = first.to(rows.dtype.element_ty), second.to(rows.dtype.element_ty)
    if ADJACENT:
        columns = tl.arange(0, 2 * BLOCK)
        both = tl.reshape(tl.join(first, second), (rows.shape[0], 2 * BLOCK))
        tl.store(rows[:, None] + columns[None, :], both, mask=_inside(live, columns, 2 * PAIRS, 2 * BLOCK))
    else:
        columns = tl.arange(0, BLOCK)
        mask = _inside(live, columns, PAIRS, BLOCK)
        tl.store(rows[:, None] + columns[None, :], first, mask=mask)
        tl.store(rows[:, None] + PAIRS + columns[None, :], second, mask=mask)


@triton.jit
def _load_table(rows, live, PER_PAIR, ADJACENT, PAIRS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Return the table's values for the first and the second features of the result, in fp32."""
    if PER_PAIR:
        columns = tl.arange(0, BLOCK)
        first = tl.load(rows[:, None] + columns[None, :], mask=_inside(live, columns, PAIRS, BLOCK), other=0.0)
        second = first
    else:
        first, second = _load_pairs(rows, live, ADJACENT, PAIRS, BLOCK)
    return first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)


@triton.jit
def _normed(x, deviation, factor, offset, NORM: tl.constexpr, DTYPE: tl.constexpr):
    """Return fp32 x times its deviation, rounded, times the weight with its offset; rounded to DTYPE, in fp32."""
    x = (x * deviation[:, None]).to(NORM[1]).to(tl.float32)
    if NORM[2] is not None:
        factor = (factor.to(NORM[2]).to(tl.float32) + offset).to(NORM[2]).to(tl.float32)
        x = (x * factor).to(NORM[3]).to(tl.float32)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _turn(
    program, tensors, extent, strides, cache, slot_mapping, k_scale, num_own, eps, offset, K_SCALE: tl.constexpr,
    STYLE: tl.constexpr, PER_PAIR: tl.constexpr, SIZE: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr,
    COMPUTE: tl.constexpr, TABLE: tl.constexpr, PROMOTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Turn ROWS rows of one tensor; with WRITE, store them in a cache (pointer, slot and head stride) too.

    Of a cache of codes, what both get are the codes, as numbers in the rows.
    """
    x, out, cos, sin, weight = tensors
    count, middle, inner = extent
    row = program * ROWS + tl.arange(0, ROWS)
    live = row < count
    at = ((row // inner // middle).to(tl.int64), (row // inner % middle).to(tl.int64), (row % inner).to(tl.int64))
    from_rows = x + at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2]
    to_rows = out + at[0] * strides[3] + at[1] * strides[4] + at[2] * strides[5]
    cos_rows = cos + at[0] * strides[6] + at[1] * strides[7] + at[2] * strides[8]
    sin_rows = sin + at[0] * strides[9] + at[1] * strides[10] + at[2] * strides[11]
    if WRITE:
        # Rows are (1, tokens, heads) here.
        written = live & (at[1] < num_own)
        slots = tl.load(slot_mapping + at[1], mask=written, other=0)
        cached_rows = cache[0] + slots * cache[1] + at[2] * cache[2]

    PAIRS: tl.constexpr = TURNED // 2
    DTYPE: tl.constexpr = x.dtype.element_ty
    a, b = _load_pairs(from_rows, live, STYLE != "half", PAIRS, BLOCK)
    cos_a, cos_b = _load_table(cos_rows, live, PER_PAIR, STYLE == "interleaved", PAIRS, BLOCK, TABLE)
    sin_a, sin_b = _load_table(sin_rows, live, PER_PAIR, STYLE == "interleaved", PAIRS, BLOCK, TABLE)
    columns = tl.arange(0, TAIL)
    if TURNED < SIZE:
        tail_mask = _inside(live, columns, SIZE - TURNED, TAIL)
        tail = tl.load(from_rows[:, None] + TURNED + columns[None, :], mask=tail_mask, other=0.0)
    if NORM is not None:
        a, b = a.to(NORM[0]).to(tl.float32), b.to(NORM[0]).to(tl.float32)
        squares = tl.sum(a * a + b * b, 1)
        if TURNED < SIZE:
            tail = tail.to(NORM[0]).to(tl.float32)
            squares += tl.sum(tail * tail, 1)
        deviation = tl.rsqrt(squares / SIZE + eps)
        factor_a, factor_b, factor_tail = 1.0, 1.0, 1.0
        if NORM[2] is not None:
            whole = tl.full((1,), 1, tl.int1)
            factor_a, factor_b = _load_pairs(weight + tl.zeros((1,), tl.int32), whole, STYLE != "half", PAIRS, BLOCK)
            if TURNED < SIZE:
                factor_tail = tl.load(weight + TURNED + columns, mask=columns < SIZE - TURNED, other=0.0)[None, :]
        a = _normed(a, deviation, factor_a, offset, NORM, DTYPE)
        b = _normed(b, deviation, factor_b, offset, NORM, DTYPE)
        if TURNED < SIZE:
            tail = _normed(tail, deviation, factor_tail, offset, NORM, DTYPE)
    if COMPUTE is not None:
        a, b = a.to(COMPUTE), b.to(COMPUTE)
    a, b = a.to(tl.float32), b.to(tl.float32)
    first = (a * cos_a - b * sin_a).to(PROMOTED)
    second = (b * cos_b + a * sin_b).to(PROMOTED)
    CODES: tl.constexpr = WRITE and cache[0].dtype.element_ty.is_fp8()
    if CODES:
        if k_scale is not None:
            k_scale = tl.load(k_scale + at[2] * K_SCALE, mask=live, other=1.0)[:, None]
        KEY: tl.constexpr = to_rows.dtype.element_ty
        CODE: tl.constexpr = cache[0].dtype.element_ty
        first_code, first = codes_of(first.to(KEY).to(tl.float32), k_scale, CODE)
        second_code, second = codes_of(second.to(KEY).to(tl.float32), k_scale, CODE)
    _store_pairs(to_rows, live, first, second, STYLE == "interleaved", PAIRS, BLOCK)
    if TURNED < SIZE:
        tail = tail.to(to_rows.dtype.element_ty)
        if CODES:
            codes, numbers = codes_of(tail.to(tl.float32), k_scale, CODE)
            tail = numbers.to(to_rows.dtype.element_ty)
        tl.store(to_rows[:, None] + TURNED + columns[None, :], tail, mask=tail_mask)
    if WRITE:
        if CODES:
            first, second = first_code, second_code
        _store_pairs(cached_rows, written, first, second, STYLE == "interleaved", PAIRS, BLOCK)
        if TURNED < SIZE:
            tail_mask = _inside(written, columns, SIZE - TURNED, TAIL)
            tail = codes if CODES else tail.to(cached_rows.dtype.element_ty)
            tl.store(cached_rows[:, None] + TURNED + columns[None, :], tail, mask=tail_mask)


@triton.jit
def _write_values(
    program, value, count, num_heads, cache, slot_mapping, v_scale, rounded, num_own, V_SCALE, ROWS, SIZE, BLOCK
):  # fmt: skip
    """Write ROWS rows of value (pointer, token stride, head stride) into its cache.

    rounded: None, or, where that holds codes, where to write these as numbers, (T, K, V).
    """
    row = program * ROWS + tl.arange(0, ROWS)
    token, head, v = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64), tl.arange(0, BLOCK)
    written = (row < count) & (token < num_own)
    rows = value[0] + token * value[1] + head * value[2]
    values = tl.load(rows[:, None] + v[None, :], mask=_inside(written, v, SIZE, BLOCK), other=0.0)
    slots = tl.load(slot_mapping + token, mask=written, other=0)
    if rounded is not None:
        if v_scale is not None:
            v_scale = tl.load(v_scale + head * V_SCALE, mask=written, other=1.0)[:, None]
        values, numbers = codes_of(values.to(tl.float32), v_scale, cache[0].dtype.element_ty)
        write_rows(numbers, rounded + row.to(tl.int64) * SIZE, written, SIZE, BLOCK)
    write_rows(values, cache[0] + head * cache[2] + slots * cache[1], written, SIZE, BLOCK)


@triton.jit
def rotary_kernel(
    query, query_extent, query_strides, key, key_extent, key_strides, value, key_cache, value_cache, slot_mapping,
    query_starts, k_scale, v_scale, rounded, num_seqs, eps, offset, STYLE: tl.constexpr, PER_PAIR: tl.constexpr,
    SIZE: tl.constexpr, TURNED: tl.constexpr, QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr, COMPUTE: tl.constexpr,
    TABLE: tl.constexpr, PROMOTED: tl.constexpr, WRITE: tl.constexpr, VALUE_SIZE: tl.constexpr, K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Turn query, then key; with WRITE, write key and value at slot_mapping (tokens,) too, as `write_cache` does.

    query, key: (x, out, cos, sin, weight), with extents (rows, middle, inner) and strides in elements of outer, middle
    and inner for each of x, out, cos and sin. Norms: None or the dtypes (computed, normed, weight or None, product).
    COMPUTE: x is rounded to it, unless None, and the tables to TABLE. Grid: programs of ROWS rows of query, key, value.
    k_scale, v_scale, rounded: of caches of codes, as `rotate_and_write` has them.
    """
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    program = tl.program_id(0)
    num_query, num_key = tl.cdiv(query_extent[0], ROWS), tl.cdiv(key_extent[0], ROWS)
    num_own = 0
    if WRITE:
        num_own = tl.load(query_starts + num_seqs).to(tl.int32)
    if program < num_query:
        _turn(
            program, query, query_extent, query_strides, key_cache, slot_mapping, None, num_own, eps, offset, 0, STYLE,
            PER_PAIR, SIZE, TURNED, QUERY_NORM, COMPUTE, TABLE, PROMOTED, ROWS, BLOCK, TAIL, False,
        )  # fmt: skip
    elif program < num_query + num_key:
        _turn(
            program - num_query, key, key_extent, key_strides, key_cache, slot_mapping, k_scale, num_own, eps, offset,
            K_SCALE, STYLE, PER_PAIR, SIZE, TURNED, KEY_NORM, COMPUTE, TABLE, PROMOTED, ROWS, BLOCK, TAIL, WRITE,
        )  # fmt: skip
    elif WRITE:
        _write_values(
            program - num_query - num_key, value, key_extent[0], key_extent[2], value_cache, slot_mapping, v_scale,
            rounded, num_own, V_SCALE, ROWS, VALUE_SIZE, BLOCK_V,
        )  # fmt: skip
