"""`core::linear` and `core::gated_linear`: the plugin's own kernels for few rows, cuBLAS for many.

Which one is decided call by call from the real sizes, and so once per captured graph: by what was measured on this GPU
(`core_cuda.tuned`), and for sizes nobody measured by the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.implementation import OpCall
from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core_cuda.ops.activation import Gate, gated_activation_fused
from core_cuda.ops.linear.skinny import skinny_linear
from core_cuda.ops.linear.skinny_configs import MAX_ROWS, SkinnyConfig, default_config
from core_cuda.ops.registration import kernel_of
from core_cuda.tuned import winner

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_UNMEASURED_ROWS = 16
"""Rows up to which the kernels here serve sizes that nobody measured."""


@kernel_of(LINEAR)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by the skinny kernels or by cuBLAS, as `core_cuda.tuned` says for these sizes."""
    config = _choose(x, weight, gated=False)
    if config is None:
        return functional.linear(x, weight, bias)
    out: Tensor = skinny_linear(_as_rows(x), weight, bias, config=config)
    return out.view(*x.shape[:-1], weight.shape[0])


@kernel_of(GATED_LINEAR)
def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, **gate: Any) -> Tensor:
    """Multiply and gate in one kernel for few rows, else in two."""
    config = None if gate["interleaved"] else _choose(x, weight, gated=True)
    if config is None:
        gated: Tensor = gated_activation_fused(functional.linear(x, weight, bias), **gate)
        return gated
    out: Tensor = skinny_linear(_as_rows(x), weight, bias, gate=Gate(**gate), config=config)
    return out.view(*x.shape[:-1], weight.shape[0] // 2)


def why_not(call: OpCall) -> str | None:
    """Return why the kernels cannot take a call of either op, or None."""
    x, weight = call.args["x"], call.args["weight"]
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}, and the kernels take {', '.join(map(str, _DTYPES))}"
    if weight.stride(1) != 1:
        return "the rows of weight are not one run of memory each"
    return None


def _choose(x: Tensor, weight: Tensor, *, gated: bool) -> SkinnyConfig | None:
    """Return the configuration of the plugin's kernel for this product, or None for cuBLAS."""
    depth = weight.shape[1]
    rows = x.numel() // depth if depth else 0
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if not 0 < rows <= MAX_ROWS or columns == 0 or x.dtype not in _DTYPES:
        return None
    shape = {"rows": rows, "columns": columns, "depth": depth, "gated": gated}
    known, config = winner("linear", shape, ranged=("rows",))
    if known or rows > _MAX_UNMEASURED_ROWS:
        return SkinnyConfig(**config) if config else None
    return default_config(rows, columns, depth, gated=gated)


def _as_rows(x: Tensor) -> Tensor:
    """Return x as (M, K), each row one run of memory."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
