"""A tensor-parallel forward, and the ways to move its tensors: not at all, by canonical collectives, by torch's own.

Legend: n rows, W width, I inner size, V results; P processes, of which each holds 1/P of I and V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from core_conformance.cases.calls.programs import doubled

WIDTH = 16
INNER_OF_EACH, RESULTS_OF_EACH = 24, 12
"""I and V of each process: the whole has so many times the number of processes."""
Weights = Mapping[str, Tensor]

CUT: Mapping[str, int] = MappingProxyType(
    {"up": 0, "down": 1, "wide": 0, "narrow": 1, "head": 0},
)
"""Weight -> the dimension that is cut: 0 of column-parallel, 1 of row-parallel linears."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """The collectives of a forward."""

    #: The sum over the processes.
    reduce: Callable[[Tensor], Tensor]
    #: This process's rows of that sum.
    scatter: Callable[[Tensor], Tensor]
    #: The rows of all processes.
    gather_rows: Callable[[Tensor], Tensor]
    #: The columns of all processes.
    gather_columns: Callable[[Tensor], Tensor]


def _as_it_is(x: Tensor) -> Tensor:
    return x


ALONE = Moves(reduce=_as_it_is, scatter=_as_it_is, gather_rows=_as_it_is, gather_columns=_as_it_is)
"""One process that holds everything."""


def canonical() -> Moves:
    """Return the moves by `core`'s ops, among the default group."""
    ops = torch.ops.core
    return Moves(
        reduce=lambda x: ops.all_reduce(x, ""),
        scatter=lambda x: ops.reduce_scatter(x, "", 0),
        gather_rows=lambda x: ops.all_gather(x, "", 0),
        gather_columns=lambda x: ops.all_gather(x, "", x.dim() - 1),
    )


def of_graphs() -> Moves:
    """Return the moves by the ops to which torch traces collectives: each is begun, and then waited for."""
    ops, group = torch.ops._c10d_functional, distributed.group.WORLD
    assert group is not None
    size, name = group.size(), group.group_name

    def gathered(x: Tensor) -> Tensor:
        whole: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), size, name))
        return whole

    return Moves(
        reduce=lambda x: ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", name)),
        scatter=lambda x: ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", size, name)),
        gather_rows=gathered,
        gather_columns=lambda x: torch.cat(gathered(x).chunk(size), -1),
    )


def of_torch() -> Moves:
    """Return the collectives by torch's functions, whose results wait implicitly: only traced graphs can hold them."""
    from torch.distributed import _functional_collectives as collectives

    group: Any = distributed.group.WORLD
    return Moves(
        reduce=lambda x: collectives.all_reduce(x, "sum", group),
        scatter=lambda x: collectives.reduce_scatter_tensor(x, "sum", 0, group),
        gather_rows=lambda x: collectives.all_gather_tensor(x, 0, group),
        gather_columns=lambda x: torch.cat(
            # Not along the last dimension: Dynamo of torch 2.11 does not trace what torch does then.
            collectives.all_gather_tensor(x, 0, group).chunk(group.size(), 0),
            dim=-1,
        ),
    )


def weights(seed: int, like: Tensor, size: int) -> dict[str, Tensor]:
    """Return the whole weights of `size` processes, the same in each, in the dtype and on the device of a tensor."""
    inner = INNER_OF_EACH * size
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up": (inner, WIDTH), "down": (WIDTH, inner), "wide": (inner, WIDTH), "narrow": (WIDTH, inner)}
    shapes["head"] = (RESULTS_OF_EACH * size, WIDTH)
    drawn = {name: torch.randn(shape, generator=generator) / sqrt(shape[1]) for name, shape in shapes.items()}
    return {name: weight.to(like) for name, weight in drawn.items()}


def forward(x: Tensor, held: Weights, moves: Moves) -> dict[str, Tensor]:
    """Return hidden states, rows and sides [n, W] and results [n, V] of x [n, W], from this process's part of the
    weights."""
    parts = [
        functional.linear(functional.silu(functional.linear(x, held[up])), held[down])
        for up, down in (("up", "down"), ("wide", "narrow"))
    ]
    # Two sums of one size, one after the other: nothing but their order tells which is which.
    first, side = (moves.reduce(each) for each in parts)
    hidden = doubled(x + first)
    part = moves.scatter(functional.linear(functional.silu(functional.linear(hidden, held["wide"])), held["narrow"]))
    rows = moves.gather_rows(part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + 1.0))
    return {
        "hidden": hidden,
        "rows": rows,
        "results": moves.gather_columns(functional.linear(rows, held["head"])),
        "side": side,
    }


class Shard(nn.Module):
    """The forward of one process."""

    def __init__(self, whole: Weights, moves: Moves, rank: int, size: int) -> None:
        super().__init__()
        for name, weight in whole.items():
            part = weight.chunk(size, CUT[name])[rank].contiguous()
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.moves = moves

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return what `forward` gives."""
        return forward(x, dict(self.named_parameters()), self.moves)
