"""Linear layers with the collective before or after them, whose exchange a kernel may hide behind the product.

`core::all_gather_linear` and `core::linear_reduce_scatter`, the two halves of asynchronous tensor parallelism: parts of
the product are computed while others are on their way (Wang et al., "Overlap Communication with Dependent Computation
via Decomposition in Large Deep Learning Models", ASPLOS 2023). Groups are those of collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, check
from core.common.ops.collective.collectives import ALL_GATHER, REDUCE_SCATTER
from core.common.ops.declaration import CanonicalOp, declare


def _gathered(gather: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return linear(gathered, weight, bias) and gathered, of the reference of `core::all_gather` or its fake."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *where: Any, **named: Any) -> tuple[Tensor, Tensor]:
        gathered = gather(x, *where, **named)
        return functional.linear(gathered, weight, bias), gathered

    return run


def _scattered(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what `core::reduce_scatter` or its fake makes of a linear: every process adds its own bias."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *where: Any, **named: Any) -> Tensor:
        return scatter(functional.linear(x, weight, bias), *where, **named)

    return run


def _check(op: str) -> Callable[..., None]:
    """Return the check of an op: dim is none of the features, which are the last dimension."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dim: int = 0, *_: Any, **__: Any) -> None:
        check(x.dim() >= 2, op, "x must have rank 2 or more")
        check(dim not in (-1, x.dim() - 1), op, f"dimension {dim} holds the features of x, not tokens")

    return run


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return rows and a batch of one sequence, with and without bias."""
    layer = {"weight": draw(32, 48, scale=48**-0.5), "bias": draw(32), "group": ""}
    return {
        "rows": {"x": draw(7, 48), **layer},
        "no bias": {"x": draw(7, 48), **layer, "bias": None},
        "no tokens": {"x": draw(0, 48), **layer},
        "slice of wider rows": {"x": draw(5, 144)[:, 48:96], **layer},
        "a sequence": {"x": draw(1, 9, 48), **layer, "dim": 1},
    }


ALL_GATHER_LINEAR = declare(
    CanonicalOp(
        schema="all_gather_linear(Tensor x, Tensor weight, Tensor? bias, str group, int dim=0, SymInt? size=None) "
        "-> (Tensor result, Tensor gathered)",
        reference=_gathered(ALL_GATHER.reference),
        fake=_gathered(ALL_GATHER.fake),
        check=_check("all_gather_linear"),
        calls=_calls,
        seed=18,
        break_point=True,
    )
)
"""(linear(gathered, weight, bias), gathered), where gathered is `all_gather(x, group, dim, size)`."""
LINEAR_REDUCE_SCATTER = declare(
    CanonicalOp(
        schema="linear_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str group, int dim=0) -> Tensor",
        reference=_scattered(REDUCE_SCATTER.reference),
        fake=_scattered(REDUCE_SCATTER.fake),
        check=_check("linear_reduce_scatter"),
        calls=_calls,
        seed=19,
        break_point=True,
    )
)
"""`reduce_scatter(linear(x, weight, bias), group, dim)`."""
