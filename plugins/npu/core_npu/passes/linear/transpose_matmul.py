"""Fuse a batched product between transposed batches to `npu_transpose_batchmatmul`, by Inductor's matcher.

Absorbed projections of latent attention multiply each head by a matrix of its own: tokens and heads change places, the
batch of heads is multiplied, and they change back, with a copy on either side. On the device `matmul` of batches stays
whole in a graph of ATen ops, elsewhere it is a `bmm`; there is a pattern for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from core.common.passes import Guards, InductorReplacement, Pass, PassTraits, view
from core_npu.passes.calls import op
from core_npu.passes.conditions import HALVES, first_reason
from core_npu.passes.streams import together

_ALIGNED = 128
_MOST = 65536
_PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.matmul.default)


def _inside(product: OpOverload[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def search(rows: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = product(rows.transpose(0, 1), weights)
        return result.transpose(0, 1)

    return search


def _after(product: OpOverload[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def search(batches: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = product(batches, weights)
        return result.transpose(0, 1)

    return search


def _fused_inside(rows: Tensor, weights: Tensor) -> Any:
    return op("npu_transpose_batchmatmul")(rows, weights, perm_x1=[1, 0, 2], perm_y=[1, 0, 2])


def _fused_after(batches: Tensor, weights: Tensor) -> Any:
    return op("npu_transpose_batchmatmul")(batches, weights, perm_x1=[0, 1, 2], perm_y=[1, 0, 2])


def refusal(match: Any) -> str | None:
    """Return why the kernel does not take a match's product, or None."""
    product = next(node for node in match.nodes if node.target in _PRODUCTS)
    left, right = product.args
    batches, rows = view.shape(left) or (), view.shape(right) or ()
    if len(batches) != 3 or len(rows) != 3:
        return f"{left} and {right} have ranks {len(batches)} and {len(rows)}, the kernel takes 3"
    dtypes = {view.dtype(left), view.dtype(right)}
    inside = view.kind(left) == "transpose" and left in match.nodes
    contracted = batches[0] * batches[2] if inside else batches[2]
    what = "batches times inner size" if inside else "the inner size"
    return (
        first_reason(
            "" if len(dtypes) == 1 and dtypes <= HALVES else f"{product} multiplies {dtypes}",
            *(_unaligned(node) for node in (left, right)),
            "" if type(contracted) is int and contracted < _MOST else f"{what} is {contracted}, not below {_MOST}",
            "" if together(*match.nodes) else f"{product} and what is around it run in two streams or scopes",
        )
        or None
    )


def _unaligned(node: fx.Node) -> str:
    size = (view.shape(node) or (0,))[-1]
    aligned = type(size) is int and size % _ALIGNED == 0
    return "" if aligned else f"rows of {node} have {size} elements, no multiple of {_ALIGNED}"


def _device() -> str:
    """Return where patterns are traced: on the device itself, where `matmul` stays whole, if there is one."""
    npu: Any = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def _operands() -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float16, device=_device()) for shape in ((3, 5, 128), (5, 128, 256))]


def _batches() -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float16, device=_device()) for shape in ((5, 3, 128), (5, 128, 256))]


class _Absorbed(nn.Module):
    """Two products of each head with its matrix: one of rows with the tokens first, one of heads first."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Parameter(torch.randn(5, 128, 128, generator=generator) / 12)
        self.second = nn.Parameter(torch.randn(5, 128, 128, generator=generator) / 12)

    def forward(self, rows: Tensor) -> Tensor:
        turned = torch.bmm(rows.transpose(0, 1), self.first).transpose(0, 1)
        return torch.bmm(turned.sin().movedim(0, 1).contiguous(), self.second).transpose(0, 1) * 2


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield the two products."""
    rows = partial(torch.randn, 6, 5, 128, generator=torch.Generator().manual_seed(8))
    yield _Absorbed(), (rows(),)


FUSE_TRANSPOSE_BATCHMATMUL = Pass(
    name="fuse_npu_transpose_batchmatmul",
    does="Replace a batched product, turned before and after or only after, by one `npu_transpose_batchmatmul`.",
    mechanism="inductor",
    stage="aten",
    patterns=tuple(
        InductorReplacement(search=form(product), replace=fused, examples=operands, check=refusal)
        for form, fused, operands in ((_inside, _fused_inside, _operands), (_after, _fused_after, _batches))
        for product in _PRODUCTS
    ),
    guards=Guards(dtypes=HALVES, min_rank=3),
    examples=examples,
    owner="npu",
    traits=PassTraits(
        on_request="for it alone graphs are turned into ATen ops; it pays where heads have matrices of their own (MLA)"
    ),
)
