"""`core::linear` and `core::gated_linear`: the plugin's own kernels for few rows, cuBLAS for many.

Which one is decided call by call from the real sizes, and so once per captured graph: by what was measured on this GPU
(`core_cuda.tuned`). For sizes nobody measured the number of rows decides, and the other kernel is an implementation of
its own, which is timed when a program is made.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.implementation import OpCall
from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core_cuda.ops.activation import Gate, gated_activation_fused
from core_cuda.ops.linear.skinny import skinny_linear
from core_cuda.ops.linear.skinny_configs import MAX_ROWS, SkinnyConfig, default_config, preferred_rows, timed
from core_cuda.ops.registration import kernel_of
from core_cuda.tuned import winner

_DTYPES = (torch.bfloat16, torch.float16)


@kernel_of(LINEAR)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by the skinny kernels or by cuBLAS, as `core_cuda.tuned` says for these sizes."""
    return _multiply(x, weight, bias, _choose(x, weight, gated=False)[1])


@kernel_of(LINEAR, "other")
def linear_other(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by what `linear` does not take for these sizes; where they were measured, by what it takes."""
    return _multiply(x, weight, bias, _other(x, weight, gated=False)[1])


@kernel_of(GATED_LINEAR)
def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, **gate: Any) -> Tensor:
    """Multiply and gate in one kernel for few rows, else in two."""
    return _multiply_and_gate(x, weight, bias, Gate(**gate), _choose(x, weight, gated=True)[1])


@kernel_of(GATED_LINEAR, "other")
def gated_linear_other(x: Tensor, weight: Tensor, bias: Tensor | None, **gate: Any) -> Tensor:
    """Do what `gated_linear` does not do for these sizes; where they were measured, what it does."""
    return _multiply_and_gate(x, weight, bias, Gate(**gate), _other(x, weight, gated=True)[1])


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, config: SkinnyConfig | None) -> Tensor:
    if config is None:
        return _by_library(x, weight, bias)
    out: Tensor = skinny_linear(_as_rows(x), weight, bias, config=config)
    return out.view(*x.shape[:-1], weight.shape[0])


def _multiply_and_gate(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate, config: SkinnyConfig | None
) -> Tensor:
    if config is None or gate.interleaved:
        gated: Tensor = gated_activation_fused(_by_library(x, weight, bias), **asdict(gate))
        return gated
    out: Tensor = skinny_linear(_as_rows(x), weight, bias, gate=gate, config=config)
    return out.view(*x.shape[:-1], weight.shape[0] // 2)


def why_not(call: OpCall) -> str | None:
    """Return why the kernels cannot take a call of either op, or None."""
    x, weight = call.args["x"], call.args["weight"]
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}, and the kernels take {', '.join(map(str, _DTYPES))}"
    if weight.stride(1) != 1:
        return "the rows of weight are not one run of memory each"
    return None


def other_timed(call: OpCall) -> str | None:
    """Return why the other kernel of either op is not worth timing at the sizes of a call, or None."""
    x, weight = call.args["x"], call.args["weight"]
    if call.args.get("interleaved"):
        return "the plugin's kernels take no alternating gates"
    gated = "kind" in call.args
    rows, columns, _ = _sizes(x, weight, gated=gated)
    if not timed(rows, columns, gated=gated):
        return f"it has {rows} rows and {columns} columns, and cuBLAS wins there"
    return _other(x, weight, gated=gated)[0]


def _choose(x: Tensor, weight: Tensor, *, gated: bool) -> tuple[bool, SkinnyConfig | None]:
    """Return whether this product was measured, and the configuration of the plugin's kernel, None for cuBLAS."""
    rows, columns, depth = _sizes(x, weight, gated=gated)
    if not 0 < rows <= MAX_ROWS or columns == 0 or x.dtype not in _DTYPES:
        return True, None
    shape = {"rows": rows, "columns": columns, "depth": depth, "gated": gated}
    known, config = winner("linear", shape, ranged=("rows",))
    if known or rows > preferred_rows():
        return known, SkinnyConfig(**config) if config else None
    return False, default_config(rows, columns, depth, gated=gated)


def _other(x: Tensor, weight: Tensor, *, gated: bool) -> tuple[str | None, SkinnyConfig | None]:
    """Return why the kernel that `_choose` does not choose is not worth timing, or None; and its configuration."""
    known, config = _choose(x, weight, gated=gated)
    if known:
        return "cuBLAS takes more rows, and what was measured on this GPU is known", config
    return None, None if config else default_config(*_sizes(x, weight, gated=gated), gated=gated)


def _sizes(x: Tensor, weight: Tensor, *, gated: bool) -> tuple[int, int, int]:
    """Return the rows of x, the columns of the result, and what they are summed over."""
    depth = weight.shape[1]
    return x.numel() // depth if depth else 0, weight.shape[0] // (2 if gated else 1), depth


def _by_library(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by cuBLAS, rows side by side: where strides hide that, torch multiplies each by a copy of the weight."""
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    return functional.linear(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def _as_rows(x: Tensor) -> Tensor:
    """Return x as (M, K), each row one run of memory."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
