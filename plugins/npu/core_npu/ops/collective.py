"""torch_npu's products with a collective in the same kernel; other collectives run as their references, by HCCL.

torch_npu's documentation calls them MC2 operators: parts of the product are sent while others are computed. They name
HCCL's communicator, which a process group makes at its first collective.

Shapes: x (..., K), weight (N, K), bias (N,). Sums are of results that each NPU has rounded to x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.canonical import ALL_GATHER_LINEAR, ALL_REDUCE, LINEAR_REDUCE_SCATTER
from core.common.ops.collective.collectives import group_size, shared_group
from core.common.ops.implementation import OpCall
from core_npu.ops.conditions import HALF, all_of, dtypes, same_dtype
from core_npu.ops.registration import kernel_of, own_op

__all__ = [
    "all_gather_linear",
    "linear_all_reduce",
    "linear_condition",
    "linear_reduce_scatter",
    "why_not_npus",
]

NUM_NPUS = (2, 4, 8)
"""The numbers of NPUs of an Atlas A2 among which the fused kernels exchange."""
_LEAST_WIDTH, _END_OF_WIDTHS = 256, 65535
"""Of K, in the kernels with an all-gather or a reduce-scatter; the second is refused."""
_MODE = "aiv"
"""The vector cores send. It is the mode that torch_npu documents for inference; the default one is for training."""


def why_not_npus(group: str) -> str:
    """Return why the kernels that multiply and exchange can't do so among the processes of a group, or ""."""
    size = group_size(group)
    if size not in NUM_NPUS:
        return f"the group has {size} processes, and the kernels take {', '.join(map(str, NUM_NPUS))}"
    return ""


def _communicator(group: str, device: torch.device) -> tuple[str, int]:
    """Return the name of a group's communicator, which all its processes make together, and their number."""
    found = shared_group(group)
    return found._get_backend(device).get_hccl_comm_name(device.index), found.size()


@kernel_of(LINEAR_REDUCE_SCATTER)
def linear_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int = 0) -> Tensor:
    """Do what `core::linear_reduce_scatter` does, for calls that `linear_condition` lets pass."""
    rows, back = _rows(x, dim)
    if not rows.numel():  # the kernels take no empty tensors
        return LINEAR_REDUCE_SCATTER.fake(x, weight, bias, group, dim)  # type: ignore[no-any-return]
    name, size = _communicator(group, x.device)
    out: Tensor = back(torch.ops.npu.npu_mm_reduce_scatter_base(rows, weight.t(), name, size, comm_mode=_MODE))
    return out


@kernel_of(ALL_GATHER_LINEAR)
def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int = 0, size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Do what `core::all_gather_linear` does, for calls that `linear_condition` lets pass."""
    rows, back = _rows(x, dim)
    if not rows.numel():
        return ALL_GATHER_LINEAR.fake(x, weight, bias, group, dim, size)  # type: ignore[no-any-return]
    name, num_npus = _communicator(group, x.device)
    result, gathered = torch.ops.npu.npu_all_gather_base_mm(rows, weight.t(), name, num_npus, comm_mode=_MODE)
    return back(result), back(gathered)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@own_op("linear_all_reduce(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor", _fake)
def linear_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """Return the sum over the processes of `linear(x, weight, bias)`, contiguous; on the host by the ops apart."""
    if x.device.type == "cpu":
        return ALL_REDUCE.reference(functional.linear(x, weight, bias), group)  # type: ignore[no-any-return]
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    name, _ = _communicator(group, x.device)
    out: Tensor = torch.ops.npu.npu_mm_all_reduce_base(rows, weight.t(), name, bias=bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_condition(call: OpCall) -> str | None:
    """Return why no kernel takes a call of either op of a product and a collective, or None."""
    args = call.args
    if args["bias"] is not None:
        return "it has a bias, and the kernels add none"
    width = args["x"].shape[-1]
    if not _LEAST_WIDTH <= width < _END_OF_WIDTHS:
        return f"x has rows of {width}, and the kernels take {_LEAST_WIDTH} to {_END_OF_WIDTHS - 1}"
    return _half_rows(call) or why_not_npus(args["group"]) or None


_half_rows = all_of(dtypes(("x",), HALF), same_dtype("x", "weight"))


def _rows(x: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return x as rows, those of one place along dimension `dim` together, and what turns such rows back."""
    moved = x.movedim(dim, 0)
    between = moved.shape[1:-1]

    def back(rows: Tensor) -> Tensor:
        return rows.view(-1, *between, rows.shape[-1]).movedim(0, dim).contiguous()

    return moved.reshape(-1, x.shape[-1]).contiguous(), back
