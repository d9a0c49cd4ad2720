"""An RMSNorm and the gate beside it, in one launch: the gate before the norm, as in Mamba 2, or behind it.

Mamba 2 norms `x * act(gate)` in groups of its columns (Dao and Gu, arXiv 2405.21060); layers of the gated delta rule
norm each head first (Yang, Kautz and Hatamizadeh, arXiv 2412.06464). Both compute the gate in fp32.
"""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.layout import layouts_of
from core.common.ops.mlp.activation import ACTIVATIONS, GATED_ACTIVATION
from core.common.ops.norm.norms import RMS_NORM
from core_cuda.ops import launching
from core_cuda.ops.activation import activate
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.norm.kernel import scaled
from core_cuda.ops.norm.norms import default_config, options_of
from core_cuda.ops.registration import own_kernel
from core_cuda.ops.rows import TYPES, as_rows, row_starts

MAX_WIDTH = 16384
"""The longest group of columns that a program holds in registers, beside the gate's."""

_SCHEMA = (
    "gated_norm(Tensor x, Tensor gate, Tensor? weight, float eps, *, str kind, bool norm_first, int groups=1, "
    "float offset=0.0, ScalarType? normed_dtype=None, ScalarType? weight_dtype=None, ScalarType? middle_dtype=None, "
    "ScalarType? out_dtype=None) -> Tensor"
)


def why_not(x: Any, gate: Any, weight: Any, groups: int, *dtypes: torch.dtype | None) -> str:
    """Return why the kernel can't take rows of x and gate (..., D) in this many groups of columns, or "".

    weight: None, or a tensor. dtypes: of rounding, see `gated_norm`; None is not asked about.
    """
    width = x.shape[-1]
    if type(width) is not int or not 0 < width // groups <= MAX_WIDTH:
        return f"a group has {width} of {groups} columns, and the kernel takes {MAX_WIDTH} at most"
    if weight is not None and tuple(weight.shape) != (width,):
        return f"the weight has shape {tuple(weight.shape)}, and rows have {width} columns"
    for name, each in (("x", x), ("gate", gate), ("weight", weight)):
        if each is not None and each.dtype not in DTYPES:
            return f"{name} is {each.dtype}, which the kernel does not take"
    other = next((each for each in dtypes if each is not None and each not in DTYPES), None)
    return "" if other is None else f"it rounds to {other}, which the kernel does not do"


def _reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    kind: str,
    norm_first: bool,
    groups: int = 1,
    offset: float = 0.0,
    normed_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    middle_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    x, act = x.float(), ACTIVATIONS[kind](gate.float())
    y = x if norm_first else x * act
    normed = RMS_NORM.reference(y.unflatten(-1, (groups, -1)), None, eps, normed_dtype=normed_dtype).flatten(-2)
    if weight is not None:
        factor = weight.to(weight_dtype or weight.dtype)
        normed = normed.to(normed_dtype or torch.float32) * (factor + offset if offset else factor)
    normed = normed.to(middle_dtype or torch.float32)
    result: Tensor = normed * act if norm_first else normed
    return result.to(out_dtype or torch.float32)


def _fake(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, kind: str, **options: Any) -> Tensor:
    gated: Tensor = GATED_ACTIVATION.fake(gate.float(), x.float(), kind=kind)  # strides of a product of both
    return gated.to(options.get("out_dtype") or torch.float32)


@own_kernel(_SCHEMA, _fake, _reference)
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Return the RMSNorm of x and the activation `kind` of gate, both (..., D), multiplied with each other, (..., D).

    norm_first: the norm is of x and its result is gated; else it is of `x * act(gate)`. groups: groups of columns that
    are normed by themselves. weight (D,) or None; offset is added to it. Dtypes of rounding: normed_dtype of what is
    normed, weight_dtype of the weight, middle_dtype of their product, out_dtype of the result; without one fp32, of
    weight its own. The gate is computed in fp32. For calls that `why_not` lets pass.
    """
    ((shape, strides, dtype),) = layouts_of(_fake, (x, gate, weight, eps), options)
    out = torch.empty_strided(shape, strides, dtype=dtype, device=x.device)
    groups = options.get("groups", 1)
    if reason := why_not(x, gate, weight, groups):
        raise ValueError(f"core_cuda::gated_norm: {reason}")
    written = out if out.is_contiguous() else torch.empty(shape, dtype=dtype, device=x.device)
    x, gate, parts = (_in_groups(each, groups) for each in (x, gate, written))
    rows, width = as_rows({"x": x, "gate": gate}, {"out": parts}), x.shape[-1]
    config = default_config(rows.count, width)
    rounding = [options.get(name) or torch.float32 for name in ("normed_dtype", "middle_dtype")]
    form = options_of(
        weight, eps, options.get("offset", 0.0), torch.float32, (rounding[0], options.get("weight_dtype"), rounding[1])
    )
    launching.launch(
        gated_norm_kernel,
        (triton.cdiv(rows.count, config.rows),),
        **rows.arguments,
        weight=form["weight"],
        eps=eps,
        KIND=options["kind"],
        NORM_FIRST=options["norm_first"],
        GROUPS=groups,
        **{name: form[name] for name in ("OFFSET", "NORMED", "FACTOR", "PRODUCT")},
        MIDDLE=TYPES[rounding[1]],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=config.rows,
        num_warps=config.num_warps,
    )
    rows.flush()
    return out if written is out else out.copy_(written)


def _in_groups(x: Tensor, groups: int) -> Tensor:
    """Return (..., D) as (..., groups, D / groups), whose groups of one row follow each other in the walk over rows."""
    if groups == 1:
        return x
    if x.stride(-1) != 1 or any(n > 1 and s < x.shape[-1] for n, s in zip(x.shape[:-1], x.stride(), strict=False)):
        x = x.contiguous()
    return x.view(*x.shape[:-1], groups, x.shape[-1] // groups)


@triton.jit
def gated_norm_kernel(
    x, gate, out, weight, num_rows, inner, x_outer, x_inner, gate_outer, gate_inner, out_outer, out_inner, eps,
    KIND: tl.constexpr, NORM_FIRST: tl.constexpr, GROUPS: tl.constexpr, OFFSET: tl.constexpr, NORMED: tl.constexpr,
    FACTOR: tl.constexpr, PRODUCT: tl.constexpr, MIDDLE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, FLAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of WIDTH up to BLOCK, held in registers; GROUPS of them, one after the other, are one row of weight."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (columns < WIDTH)[None, :]
    x_at = row_starts(row, inner, x_outer, x_inner, FLAT)[:, None] + columns[None, :]
    gate_at = row_starts(row, inner, gate_outer, gate_inner, FLAT)[:, None] + columns[None, :]
    out_at = row_starts(row, inner, out_outer, out_inner, FLAT)[:, None] + columns[None, :]
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    values = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    act = activate(tl.load(gate + gate_at, mask=mask, other=0.0).to(tl.float32), KIND)
    factor = None
    if weight is not None:
        at = (row % GROUPS)[:, None] * WIDTH + columns[None, :]
        factor = tl.load(weight + at, mask=mask, other=0.0).to(FACTOR).to(tl.float32)
        if OFFSET != 0.0:
            factor = (factor + OFFSET).to(FACTOR).to(tl.float32)
    if not NORM_FIRST:
        values *= act
    deviation = tl.rsqrt(tl.sum(tl.where(mask, values * values, 0.0), axis=1) / WIDTH + eps)
    result = scaled(values * deviation[:, None], factor, None, NORMED, PRODUCT, MIDDLE)
    if NORM_FIRST:
        result *= act
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=mask)
