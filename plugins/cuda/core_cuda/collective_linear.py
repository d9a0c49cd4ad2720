"""`core::all_gather_linear` and `core::linear_reduce_scatter` where GPUs share memory: copies beside products.

Asynchronous tensor parallelism, by parts of the tokens, one for each GPU: while cuBLAS multiplies one part, the copy
engines move another over NVLink. Every GPU goes through the parts in an order of its own, from its neighbour on, so no
two read or write the same GPU's memory at a time. torch has such ops (`symm_mem::fused_all_gather_matmul` and
`symm_mem::fused_matmul_reduce_scatter`, the order of whose parts this is). They take no bias, run kernels on a stream
whose cuBLAS workspace nobody keeps for graphs, and have one workspace for each group, which goes when a call needs a
larger one though captured graphs may hold its address.

Legend: P GPUs; M tokens of a part; K features of x, N of the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.common.ops.collective import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER
from core.common.ops.implementation import OpCall, OpImplementation
from core_cuda.exchange import Exchange, exchange
from core_cuda.ops.beside import Copies
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.registration import OP_OF, kernel_of
from core_cuda.symmetric import apart


def why_not(call: OpCall) -> str | None:
    """Return why parts can't be copied beside the products of a call, or None; asks the GPUs of the group.

    call: as it stands in the graph.
    """
    x = call.args["x"]
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, and parts of {', '.join(map(str, DTYPES))} are multiplied"
    for name in ("weight", "bias"):
        operand = call.args[name]
        if operand is not None and operand.dtype != x.dtype:
            return f"x is {x.dtype}, and {name} {operand.dtype}"
    return apart(call.args["group"]) or None


@kernel_of(ALL_GATHER_LINEAR)
def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int, size: int | None
) -> tuple[Tensor, Tensor]:
    """Multiply the own part while others come; by NCCL and then cuBLAS where GPUs share no memory."""
    if x.is_meta:  # asked for kernels to compile ahead, of which there are none
        return ALL_GATHER_LINEAR.fake(x, weight, bias, group, dim, size)  # type: ignore[no-any-return]
    rows, back = _rows(x, dim)
    found = exchange(group, rows.nbytes) if rows.numel() else None
    if found is None:
        return ALL_GATHER_LINEAR.reference(x, weight, bias, group, dim, size)  # type: ignore[no-any-return]
    result, gathered = gathered_product(found, rows, weight, bias)
    return back(result), back(gathered)


@kernel_of(LINEAR_REDUCE_SCATTER)
def linear_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int) -> Tensor:
    """Send a part of the product while the next is multiplied; cuBLAS and then NCCL where GPUs share no memory."""
    if x.is_meta:
        return LINEAR_REDUCE_SCATTER.fake(x, weight, bias, group, dim)  # type: ignore[no-any-return]
    rows, back = _rows(x, dim)
    num_bytes = len(rows) * len(weight) * x.element_size()
    found = exchange(group, num_bytes) if num_bytes else None
    if found is None:
        return LINEAR_REDUCE_SCATTER.reference(x, weight, bias, group, dim)  # type: ignore[no-any-return]
    return back(scattered_product(found, rows, weight, bias))


def gathered_product(found: Exchange, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the product of all GPUs' rows, (P * M, N), and these rows, (P * M, K), in the order of ranks.

    rows: (M, K), contiguous.
    """
    own, others = found.rank, _others(found)
    gathered = rows.new_empty((found.size, *rows.shape))
    result = rows.new_empty((found.size, len(rows), len(weight)))
    # Barriers stand where nothing else runs: products may fill all multiprocessors for their whole time.
    found.barrier()  # nobody still reads what the call before left here
    found.area(own, rows.shape, rows.dtype).copy_(rows)
    found.barrier()
    with Copies(rows.device) as copies:
        come = [copies.copy(gathered[each], found.area(each, rows.shape, rows.dtype)) for each in others]
        copies.copy(gathered[own], rows)
        _multiply(rows, weight, bias, result[own])
        for each, wait in zip(others, come, strict=True):
            wait()
            _multiply(gathered[each], weight, bias, result[each])
    return result.flatten(0, 1), gathered.flatten(0, 1)


def scattered_product(found: Exchange, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sum over GPUs of this GPU's part of their products, (M, N), added in fp32 in the order of ranks.

    rows: (P * M, K), contiguous.
    """
    own = found.rank
    parts = rows.view(found.size, -1, rows.shape[-1])
    shape = (parts.shape[1], len(weight))
    made = rows.new_empty((found.size - 1, *shape))
    found.barrier()  # nobody still adds what the call before left here
    with Copies(rows.device) as copies:
        for each, product in zip(_others(found), made, strict=True):
            _multiply(parts[each], weight, bias, product)
            copies.copy(found.area(each, shape, rows.dtype, index=own), product)
        _multiply(parts[own], weight, bias, found.area(own, shape, rows.dtype, index=own))
    found.barrier()
    products = found.area(own, (found.size, *shape), rows.dtype)
    return products[0] + products[1] if found.size == 2 else products.sum(0)


def _others(found: Exchange) -> list[int]:
    """Return the ranks of the other GPUs, from the next one on."""
    return [(found.rank + step) % found.size for step in range(1, found.size)]


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _rows(x: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return x as rows, those of one place along dimension `dim` together, and what turns such rows back."""
    moved = x.movedim(dim, 0)
    between = moved.shape[1:-1]

    def back(rows: Tensor) -> Tensor:
        return rows.view(-1, *between, rows.shape[-1]).movedim(0, dim).contiguous()

    return moved.reshape(-1, x.shape[-1]).contiguous(), back


IMPLEMENTATIONS = tuple(
    OpImplementation(op=OP_OF[kernel], name=f"cuda_{kernel._opname}", fn=kernel, condition=why_not)
    for kernel in (all_gather_linear, linear_reduce_scatter)
)
