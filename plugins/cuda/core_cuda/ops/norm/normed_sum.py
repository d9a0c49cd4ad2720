"""A residual plus the RMSNorm of a layer's result, and the norm of that sum where one follows: one launch.

Models norm what attention and MLP give before they add it to the residual (Gemma 2 and 3, OLMo 2 and 3, EXAONE 4,
GLM-4). Rounding is that of `core::rms_norm`, torch's addition and `core::rms_norm`, one after the other.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.layout import layouts_of
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core_cuda.ops import launching
from core_cuda.ops.conditions import all_of, computes_in_fp32, dtypes
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.norm.kernel import fetch_columns, per_column, scaled
from core_cuda.ops.norm.norms import default_config, options_of
from core_cuda.ops.registration import own_kernel
from core_cuda.ops.rows import as_rows, row_starts

MAX_WIDTH = 16384
"""The longest row that a program holds in registers, beside the residual's."""

ROUNDING = ("offset", "compute_dtype", "normed_dtype", "weight_dtype", "out_dtype")
"""The keywords of a norm; those of the second one begin with `next_`."""

_TYPES = "float {0}offset=0.0, " + ", ".join(f"ScalarType? {{0}}{name}=None" for name in ROUNDING[1:])
_FIRST = "Tensor x, Tensor residual, Tensor? weight, float eps"


def why_not(call: OpCall) -> str | None:
    """Return why the kernel can't take a norm, a call of `core::rms_norm` or `core::add_rms_norm`, or None."""
    width = call.args["x"].shape[-1]
    if type(width) is not int or not 0 < width <= MAX_WIDTH:
        return f"rows have {width} elements, and the kernel of normed sums takes {MAX_WIDTH} at most"
    names = ("x", "residual") if "residual" in call.args else ("x",)
    return all_of(dtypes, computes_in_fp32(*names))(call)


def _summed(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def summed(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **rounding: Any) -> Tensor:
        return residual + norm(x, weight, eps, **rounding)

    return summed


def _normed_after(norm: Callable[..., Tensor], next_norm: Callable[..., Any]) -> Callable[..., Any]:
    def normed(
        x: Tensor, residual: Tensor, weight: Any, eps: float, next_weight: Any, next_eps: float, **options: Any
    ) -> Any:
        first, second = _split(options)
        return next_norm(residual, norm(x, weight, eps, **first), next_weight, next_eps, **second)

    return normed


_fake_sum = _summed(RMS_NORM.fake)
_fake_norm = _normed_after(RMS_NORM.fake, ADD_RMS_NORM.fake)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords of the first norm and, without their prefix, those of the second."""
    first = {name: options[name] for name in ROUNDING if name in options}
    return first, {name: options[f"next_{name}"] for name in ROUNDING if f"next_{name}" in options}


@own_kernel(f"normed_sum({_FIRST}, *, {_TYPES.format('')}) -> Tensor", _fake_sum, _summed(RMS_NORM.reference))
def normed_sum(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **rounding: Any) -> Tensor:
    """Return residual + rms_norm(x), both (..., D), in their common dtype; for calls that `why_not` lets pass."""
    ((shape, strides, dtype),) = layouts_of(_fake_sum, (x, residual, weight, eps), rounding)
    total = torch.empty_strided(shape, strides, dtype=dtype, device=x.device)
    _run(x, residual, total, None, (weight, eps, rounding), None)
    return total


@own_kernel(
    f"normed_sum_rms_norm({_FIRST}, Tensor? next_weight, float next_eps, *, {_TYPES.format('')}, "
    f"{_TYPES.format('next_')}) -> (Tensor normed, Tensor sum)",
    _fake_norm,
    _normed_after(RMS_NORM.reference, ADD_RMS_NORM.reference),
)
def normed_sum_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    next_weight: Tensor | None,
    next_eps: float,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(sum), sum) where sum = residual + rms_norm(x), as `normed_sum` gives it."""
    made = layouts_of(_fake_norm, (x, residual, weight, eps, next_weight, next_eps), options)
    out, total = (torch.empty_strided(shape, strides, dtype=dtype, device=x.device) for shape, strides, dtype in made)
    first, second = _split(options)
    _run(x, residual, total, out, (weight, eps, first), (next_weight, next_eps, second))
    return out, total


_Norm = tuple[Tensor | None, float, dict[str, Any]]  # weight, eps, rounding


def _run(x: Tensor, residual: Tensor, total: Tensor, out: Tensor | None, norm: _Norm, then: _Norm | None) -> None:
    """Launch the kernel; then: the norm of the sum, which goes to out."""
    rows, width = as_rows({"x": x, "residual": residual}, {"total": total, "out": out}), x.shape[-1]
    config = default_config(rows.count, width)
    weight, form = _form(norm, x.dtype)
    next_weight, next_form = (None, None) if then is None else _form(then, total.dtype)
    launching.launch(
        normed_sum_kernel,
        (triton.cdiv(rows.count, config.rows),),
        **rows.arguments,
        weight=weight,
        next_weight=next_weight,
        eps=norm[1],
        next_eps=0.0 if then is None else then[1],
        FORM=form,
        NEXT=next_form,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=config.rows,
        num_warps=config.num_warps,
    )
    rows.flush()


def _form(norm: _Norm, dtype: torch.dtype) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Return the weight, and OFFSET, NORMED, FACTOR, PRODUCT and STORED of a norm of rows of this dtype."""
    weight, eps, rounding = norm
    dtypes = [rounding.get(name) for name in ROUNDING[2:]]
    options = options_of(weight, eps, rounding.get("offset", 0.0), dtype, dtypes)
    return options["weight"], tuple(options[name] for name in ("OFFSET", "NORMED", "FACTOR", "PRODUCT", "STORED"))


@triton.jit
def _normed(values, weight, columns, inside, eps, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Return fp32 rows, zero beyond WIDTH, normed and rounded as FORM says, fp32."""
    deviation = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)
    factor = None
    if weight is not None:
        factor = per_column(weight, columns, inside, FORM[0], FORM[2])
    return scaled(values * deviation[:, None], factor, None, FORM[1], FORM[3], FORM[4])


@triton.jit
def normed_sum_kernel(
    x, residual, total, out, weight, next_weight, num_rows, inner, x_outer, x_inner, residual_outer, residual_inner,
    total_outer, total_inner, out_outer, out_inner, eps, next_eps, FORM: tl.constexpr, NEXT: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FLAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm ROWS rows of x, add the residual's, store the sum; with NEXT, norm that and store it in `out`.

    FORM, NEXT: OFFSET, NORMED, FACTOR, PRODUCT and STORED, as `norm_kernel` has them.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    mask = (row < num_rows)[:, None] & inside[None, :]
    x_at = row_starts(row, inner, x_outer, x_inner, FLAT)[:, None] + columns[None, :]
    residual_at = row_starts(row, inner, residual_outer, residual_inner, FLAT)[:, None] + columns[None, :]
    total_at = row_starts(row, inner, total_outer, total_inner, FLAT)[:, None] + columns[None, :]
    if OVERLAP:  # noqa: SIM102  a constant of the compiler, decided before the other condition is looked at
        if tl.program_id(0) == 0:
            if weight is not None:
                fetch_columns(weight, WIDTH)
            if next_weight is not None:
                fetch_columns(next_weight, WIDTH)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    values = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    added = tl.load(residual + residual_at, mask=mask, other=0.0).to(tl.float32)
    normed = _normed(values, weight, columns, inside, eps, WIDTH, FORM)
    rounded = (added + normed).to(total.dtype.element_ty)
    tl.store(total + total_at, rounded, mask=mask)
    if NEXT is not None:
        values = tl.where(mask, rounded.to(tl.float32), 0.0)
        result = _normed(values, next_weight, columns, inside, next_eps, WIDTH, NEXT)
        out_at = row_starts(row, inner, out_outer, out_inner, FLAT)[:, None] + columns[None, :]
        tl.store(out + out_at, result, mask=mask)
