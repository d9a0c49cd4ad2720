"""`core::rotary_table` in one launch: a program computes both tables for a few tokens and all frequencies."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.rotary.table import ROTARY_TABLE
from core_cuda.ops import launching
from core_cuda.ops.conditions import dtypes
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rows import outputs

_MAX_FREQUENCIES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """How tokens are shared out among programs."""

    #: tokens of a program, a power of two
    rows: int
    num_warps: int


def default_config(num_tokens: int, num_frequencies: int) -> TableConfig:
    """Return how the angles are shared out: few over as many programs as fit, and never more than 8 to a thread."""
    block = triton.next_power_of_2(num_frequencies)
    wanted = triton.cdiv(max(num_tokens, 1), 2 * launching.num_multiprocessors())
    rows = min(triton.next_power_of_2(wanted), max(1024 // block, 1))
    return TableConfig(rows=rows, num_warps=min(max(rows * block // 128, 1), 8))


def candidates(num_tokens: int, num_frequencies: int) -> Iterator[TableConfig]:
    """Yield the configurations worth measuring for so many angles."""
    block = triton.next_power_of_2(num_frequencies)
    for rows in (1, 2, 4, 8, 16, 32):
        for num_warps in (1, 2, 4, 8):
            if rows <= triton.next_power_of_2(num_tokens) and 1 <= rows * block // (32 * num_warps) <= 16:
                yield TableConfig(rows=rows, num_warps=num_warps)


def why_not(call: OpCall) -> str | None:
    """Return why the kernel cannot take a call, or None."""
    count = call.args["inv_freq"].shape[0]
    if count > _MAX_FREQUENCIES:
        return f"inv_freq has {count} entries, and the kernel takes up to {_MAX_FREQUENCIES}"
    return dtypes(call)


@triton.jit(do_not_specialize=["num_tokens"])  # one kernel for all numbers of tokens
def _table_kernel(
    positions, inv_freq, cos, sin, num_tokens, F, scaling, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute both tables of some tokens. positions (T,), inv_freq (F,), cos and sin (T, W), all contiguous.

    cos and sin of Triton are those of libdevice, which reduces angles of any size; torch's own kernels call the same.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    at = tl.load(positions + rows, mask=rows < num_tokens, other=0).to(tl.float32)
    frequencies = tl.load(inv_freq + columns, mask=columns < F, other=0.0).to(tl.float32)
    angles = at[:, None] * frequencies[None, :]
    cosines = (tl.cos(angles) * scaling).to(cos.dtype.element_ty)
    sines = (tl.sin(angles) * scaling).to(sin.dtype.element_ty)
    inside = (rows < num_tokens)[:, None] & (columns < F)[None, :]
    WIDE: tl.constexpr = 1 if LAYOUT == "pairs" else 2
    STEP: tl.constexpr = 2 if LAYOUT == "interleaved" else 1
    place = rows.to(tl.int64)[:, None] * (F * WIDE) + columns[None, :] * STEP
    tl.store(cos + place, cosines, mask=inside)
    tl.store(sin + place, sines, mask=inside)
    if WIDE == 2:
        again = place + (1 if LAYOUT == "interleaved" else F)
        tl.store(cos + again, cosines, mask=inside)
        tl.store(sin + again, sines, mask=inside)


def run_rotary_table(
    positions: Tensor,
    inv_freq: Tensor,
    *,
    layout: str = "half",
    scaling: float = 1.0,
    out_dtype: torch.dtype | None = None,
    config: TableConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions (..., T) and inv_freq (F,) as `core::rotary_table` has them, in every bit."""
    arguments = {"positions": positions, "inv_freq": inv_freq, "layout": layout, "scaling": scaling}
    cos, sin = outputs(ROTARY_TABLE, {**arguments, "out_dtype": out_dtype}, inv_freq.device)
    num_tokens, count = positions.numel(), inv_freq.shape[0]
    if not count:
        return cos, sin
    config = config or default_config(num_tokens, count)
    launching.launch(
        _table_kernel, (triton.cdiv(num_tokens, config.rows),), positions.contiguous(), inv_freq.contiguous(), cos, sin,
        num_tokens, count, scaling, ROWS=config.rows, BLOCK=triton.next_power_of_2(count), LAYOUT=layout,
        num_warps=config.num_warps,
    )  # fmt: skip
    return cos, sin


rotary_table = kernel_of(ROTARY_TABLE)(run_rotary_table)
