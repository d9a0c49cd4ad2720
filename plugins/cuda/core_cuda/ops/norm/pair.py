"""Two RMSNorms that do not need each other's results, in one launch; each keeps the rounding of `core::rms_norm`.

A launch costs more than the norm of a few rows, and the norms of a layer's query and key start from one product.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.norm.norms import RMS_NORM
from core_cuda.ops import launching
from core_cuda.ops.conditions import all_of, computes_in_fp32, dtypes
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.norm.kernel import fetch_columns, per_column, scaled
from core_cuda.ops.norm.norms import MAX_WIDTH, NormConfig, default_config, options_of
from core_cuda.ops.registration import own_kernel
from core_cuda.ops.rows import Rows, as_rows, outputs, row_starts

_SCHEMA = (
    "two_rms_norms(Tensor x, Tensor y, Tensor? x_weight, Tensor? y_weight, float eps, *, float offset=0.0, "
    "ScalarType? compute_dtype=None, ScalarType? normed_dtype=None, ScalarType? weight_dtype=None, "
    "ScalarType? out_dtype=None) -> (Tensor, Tensor)"
)


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take one of the two norms, a call of `core::rms_norm`, or None."""
    width = call.args["x"].shape[-1]
    if type(width) is not int or not 0 < width <= MAX_WIDTH:
        return f"rows have {width} elements, and the kernel of two norms takes {MAX_WIDTH} at most"
    return all_of(dtypes, computes_in_fp32("x"))(call)


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two norms, as the kernel takes it."""

    rows: Rows
    config: NormConfig
    #: constants of the kernel: OFFSET, WIDTH, BLOCK, ROWS, EARLY, FLAT and the dtypes
    form: tuple[Any, ...]
    weight: Tensor | None

    @property
    def blocks(self) -> int:
        return -(-self.rows.count // self.config.rows)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.rows.arguments["x"], self.rows.arguments["out"], self.weight

    @property
    def extent(self) -> tuple[int, ...]:
        given = self.rows.arguments
        return tuple(given[n] for n in ("num_rows", "inner", "x_outer", "x_inner", "out_outer", "out_inner"))


def _side(out: Tensor, *, x: Tensor, weight: Tensor | None, eps: float, offset: float, **dtypes: Any) -> _Side:
    """Return one norm; out: where its result goes. The others are those of `core::rms_norm`."""
    rows, width = as_rows({"x": x}, {"out": out}), x.shape[-1]
    config = default_config(rows.count, width)
    rounding = [dtypes[name] for name in ("normed_dtype", "weight_dtype", "out_dtype")]
    options = options_of(weight, eps, offset, x.dtype, rounding)
    kept = tuple(options[name] for name in ("NORMED", "FACTOR", "PRODUCT", "STORED"))
    shape = (offset, width, triton.next_power_of_2(width), config.rows, config.early, rows.arguments["FLAT"])
    return _Side(rows, config, (*shape, *kept), options["weight"])


def _both(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def normed(x: Tensor, y: Tensor, x_weight: Any, y_weight: Any, eps: float, **rounding: Any) -> Any:
        return norm(x, x_weight, eps, **rounding), norm(y, y_weight, eps, **rounding)

    return normed


@own_kernel(_SCHEMA, _both(RMS_NORM.fake), _both(RMS_NORM.reference))
def two_rms_norms(
    x: Tensor,
    y: Tensor,
    x_weight: Tensor | None,
    y_weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    compute_dtype: torch.dtype | None = None,
    normed_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `core::rms_norm` makes of x (..., D) and of y (..., E), each with its own weight.

    For calls that `why_not` lets pass; compute_dtype is no wider than fp32 then, in which the kernel computes.
    """
    casts = {"normed_dtype": normed_dtype, "weight_dtype": weight_dtype, "out_dtype": out_dtype}
    given: list[dict[str, Any]] = [
        {"x": each, "weight": weight, "eps": eps, "offset": offset, "compute_dtype": compute_dtype, **casts}
        for each, weight in ((x, x_weight), (y, y_weight))
    ]
    made = [outputs(RMS_NORM, each, x.device)[0] for each in given]
    first, second = (_side(out, **each) for each, out in zip(given, made, strict=True))
    launching.launch(
        pair_norm_kernel,
        (first.blocks + second.blocks,),
        first=first.tensors,
        first_extent=first.extent,
        second=second.tensors,
        second_extent=second.extent,
        eps=eps,
        FIRST=first.form,
        SECOND=second.form,
        num_warps=max(first.config.num_warps, second.config.num_warps),
    )
    for side in (first, second):
        side.rows.flush()
    return made[0], made[1]


@triton.jit
def _fetch(weight, FORM: tl.constexpr):
    if weight is not None:
        fetch_columns(weight, FORM[1])


@triton.jit
def _norm_rows(program, tensors, extent, eps, FORM: tl.constexpr):
    """Norm ROWS rows of one side; FORM: as FIRST of the kernel."""
    x, out, weight = tensors
    count, inner, x_outer, x_inner, out_outer, out_inner = extent
    OFFSET: tl.constexpr = FORM[0]
    WIDTH: tl.constexpr = FORM[1]
    BLOCK: tl.constexpr = FORM[2]
    ROWS: tl.constexpr = FORM[3]
    EARLY: tl.constexpr = FORM[4]
    FLAT: tl.constexpr = FORM[5]
    row = program * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    mask = (row < count)[:, None] & inside[None, :]
    x_at = row_starts(row, inner, x_outer, x_inner, FLAT)[:, None] + columns[None, :]
    out_at = row_starts(row, inner, out_outer, out_inner, FLAT)[:, None] + columns[None, :]
    factor = None
    if EARLY and weight is not None:
        factor = per_column(weight, columns, inside, OFFSET, FORM[7])
    values = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    deviation = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)
    if not EARLY and weight is not None:
        factor = per_column(weight, columns, inside, OFFSET, FORM[7])
    result = scaled(values * deviation[:, None], factor, None, FORM[6], FORM[8], FORM[9])
    tl.store(out + out_at, result, mask=mask)


@triton.jit
def pair_norm_kernel(
    first, first_extent, second, second_extent, eps, FIRST: tl.constexpr, SECOND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm the rows of two tensors: programs of the first, then of the second.

    first, second: x, out and weight (or None); extents: rows, inner, and strides of outer and inner for x and out.
    FIRST, SECOND: OFFSET, WIDTH, BLOCK, ROWS, EARLY, FLAT, NORMED, FACTOR, PRODUCT, STORED, as `norm_kernel` has them.
    """
    program = tl.program_id(0)
    num_first = tl.cdiv(first_extent[0], FIRST[3])
    if OVERLAP:
        if program == 0:
            _fetch(first[2], FIRST)
        if program == num_first:
            _fetch(second[2], SECOND)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    if program < num_first:
        _norm_rows(program, first, first_extent, eps, FIRST)
    else:
        _norm_rows(program - num_first, second, second_extent, eps, SECOND)
