"""Products with a collective in the same kernel: each rank rounds its product, sums are in the order of ranks.

The kernels send parts of a product while they compute others, which changes no number here.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from simulator.bounds import HALF, demand
from simulator.kernels.matmul import product
from simulator.library import library
from simulator.marshal import kernel

_LEAST_WIDTH, _END_OF_WIDTHS = 256, 65535


def _exchanged(name: str, own: Tensor) -> Tensor:
    """Return this tensor of all ranks, (ranks, …), in their order."""
    rank, size = ctypes.c_int32(), ctypes.c_int32()
    demand(bool(library().ascend_sim_place(ctypes.byref(rank), ctypes.byref(size))), "no communicator")
    own = own.contiguous()
    gathered = own.new_empty((size.value, *own.shape))
    sent, all_bytes = ctypes.c_void_p(own.data_ptr()), ctypes.c_void_p(gathered.data_ptr())
    code = library().ascend_sim_exchange(name.encode(), sent, ctypes.c_uint64(own.nbytes), all_bytes)
    demand(not code, "the other ranks did not exchange; aclGetRecentErrMsg of this thread said why")
    return gathered


def _sum(name: str, x1: Tensor, x2: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum over ranks of the products, in fp32; each rank adds its own bias and rounds."""
    demand(x1.dtype in HALF and x1.dtype == x2.dtype == dtype, f"x1 {x1.dtype}, x2 {x2.dtype}, output {dtype}")
    demand(bias is None or (bias.dtype == dtype and bias.shape == x2.shape[1:]), "a bias of the output's dtype")
    demand(x1.numel() > 0 and x1.is_contiguous() and x2.dim() == 2, "x1 with elements, as it lies")
    own = product(x1, x2)
    own = own if bias is None else own + bias.float()
    parts = _exchanged(name, own.to(dtype)).float()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _demand_width(x1: Tensor, bias: Tensor | None) -> None:
    demand(x1.dim() == 2 and _LEAST_WIDTH <= x1.shape[1] < _END_OF_WIDTHS, f"x1 {tuple(x1.shape)}")
    demand(bias is None, "a bias")


@kernel("aclnnMatmulAllReduce", "TTTGCIIT")
def matmul_all_reduce(
    x1: Tensor, x2: Tensor, bias: Tensor | None, group: str, op: str, turn: int, stream_mode: int, out: Tensor
) -> None:
    """The sum over ranks of x1 @ x2 + bias."""
    demand(op == "sum" and turn == 0 and x1.dim() in (2, 3), f"{op}, {turn}")
    out.copy_(_sum("aclnnMatmulAllReduce", x1, x2, bias, out.dtype))


@kernel("aclnnMatmulReduceScatterV2", "TTTTTTIGCIIICTT")
def matmul_reduce_scatter(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None,
    x1_scale: Tensor | None,
    x2_scale: Tensor | None,
    quant_scale: Tensor | None,
    block_size: int,
    group: str,
    op: str,
    turn: int,
    stream_mode: int,
    group_size: int,
    mode: str,
    out: Tensor,
    amax: Tensor | None,
) -> None:
    """This rank's rows of the sum over ranks of x1 @ x2."""
    _demand_width(x1, bias)
    demand(op == "sum" and turn == 0 and mode == "aiv", f"{op}, {turn}, {mode}")
    demand(x1_scale is None and x2_scale is None and quant_scale is None and amax is None, "codes are not simulated")
    total, rank, size = _sum("aclnnMatmulReduceScatterV2", x1, x2, bias, out.dtype), ctypes.c_int32(), ctypes.c_int32()
    library().ascend_sim_place(ctypes.byref(rank), ctypes.byref(size))
    demand(len(x1) % size.value == 0, f"{len(x1)} rows among {size.value} ranks")
    out.copy_(total.view(size.value, *out.shape)[rank.value])


@kernel("aclnnAllGatherMatmulV2", "TTTTTTIGIIIICTTT")
def all_gather_matmul(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None,
    x1_scale: Tensor | None,
    x2_scale: Tensor | None,
    quant_scale: Tensor | None,
    block_size: int,
    group: str,
    gather_index: int,
    turn: int,
    stream_mode: int,
    group_size: int,
    mode: str,
    out: Tensor,
    gathered: Tensor,
    amax: Tensor | None,
) -> None:
    """The x1 of all ranks @ x2, and the x1 of all ranks."""
    _demand_width(x1, bias)
    demand(gather_index == 0 and turn == 0 and mode == "aiv", f"{gather_index}, {turn}, {mode}")
    demand(x1_scale is None and x2_scale is None and quant_scale is None and amax is None, "codes are not simulated")
    demand(x1.dtype in HALF and x1.dtype == x2.dtype, f"x1 {x1.dtype}, x2 {x2.dtype}")
    whole = _exchanged("aclnnAllGatherMatmulV2", x1).flatten(0, 1)
    out.copy_(product(whole, x2))
    gathered.copy_(whole)
