"""Linear layers with the collective before or after them, whose exchange a kernel may hide behind the product.

`core::all_gather_linear` and `core::linear_reduce_scatter`, the two halves of asynchronous tensor parallelism: parts of
the product are computed while others are on their way (Wang et al., "Overlap Communication with Dependent Computation
via Decomposition in Large Deep Learning Models", ASPLOS 2023). Groups are those of collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, check
from core.common.ops.collective.collectives import all_gather, all_gather_fake, reduce_scatter, reduce_scatter_fake
from core.common.ops.declaration import CanonicalOp, Sample, declare

GATHER_SCHEMA = (
    "all_gather_linear(Tensor x, Tensor weight, Tensor? bias, str group, int dim=0, SymInt? size=None) "
    "-> (Tensor result, Tensor gathered)"
)
SCATTER_SCHEMA = "linear_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str group, int dim=0) -> Tensor"


def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int = 0, size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (linear(gathered, weight, bias), gathered), where gathered is `all_gather(x, group, dim, size)`.

    dim is none of the features: these are the last dimension.
    """
    _check("all_gather_linear", x, dim)
    gathered = all_gather(x, group, dim, size)
    return functional.linear(gathered, weight, bias), gathered


def linear_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int = 0) -> Tensor:
    """Return `reduce_scatter(linear(x, weight, bias), group, dim)`: every process adds its own bias."""
    _check("linear_reduce_scatter", x, dim)
    return reduce_scatter(functional.linear(x, weight, bias), group, dim)


def _check(op: str, x: Tensor, dim: int) -> None:
    check(x.dim() >= 2, op, "x must have rank 2 or more")
    check(dim not in (-1, x.dim() - 1), op, f"dimension {dim} holds the features of x, not tokens")


def _gather_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int = 0, size: int | None = None
) -> tuple[Tensor, Tensor]:
    _check("all_gather_linear", x, dim)
    gathered = all_gather_fake(x, group, dim, size)
    return functional.linear(gathered, weight, bias), gathered


def _scatter_fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int = 0) -> Tensor:
    _check("linear_reduce_scatter", x, dim)
    return reduce_scatter_fake(functional.linear(x, weight, bias), group, dim)


def _samples(draw: Draw) -> Iterator[Sample]:
    layer: dict[str, Any] = {"weight": draw(32, 48, scale=48**-0.5), "bias": draw(32), "group": ""}
    yield Sample(name="rows", kwargs={"x": draw(7, 48), **layer})
    yield Sample(name="no bias", kwargs={"x": draw(7, 48), **layer, "bias": None})
    yield Sample(name="no tokens", kwargs={"x": draw(0, 48), **layer})
    yield Sample(name="slice of wider rows", kwargs={"x": draw(5, 144)[:, 48:96], **layer})
    yield Sample(name="a sequence", kwargs={"x": draw(1, 9, 48), **layer, "dim": 1})


def gather_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield rows and a batch of one sequence, with and without bias."""
    yield from _samples(Draw(dtype, device, seed=18))


def scatter_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield the same."""
    yield from _samples(Draw(dtype, device, seed=19))


ALL_GATHER_LINEAR = declare(
    CanonicalOp(
        name="all_gather_linear",
        schema=GATHER_SCHEMA,
        reference=all_gather_linear,
        fake=_gather_fake,
        samples=gather_samples,
        break_point=True,
    )
)
LINEAR_REDUCE_SCATTER = declare(
    CanonicalOp(
        name="linear_reduce_scatter",
        schema=SCATTER_SCHEMA,
        reference=linear_reduce_scatter,
        fake=_scatter_fake,
        samples=scatter_samples,
        break_point=True,
    )
)
