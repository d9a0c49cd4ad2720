"""Lift products with a bound weight that are no linear layers to `core::linear`, by Inductor's matcher.

Models spell such a product as `torch.addmm` (GPT-2's layers), `x @ w`, `torch.matmul` or an `einsum`. Among ATen ops
all of them are `addmm`, `mm`, or a `bmm` of a single batch, which only ATen shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.common.ops.linear.gated import LINEAR
from core.common.passes import (
    Guards,
    InductorGraphPattern,
    Pass,
    PassTraits,
    set_value,
    value_of,
    view,
)

_PRODUCTS = frozenset({"addmm", "mm", "bmm", "matmul", "einsum"})


def nothing(graph: fx.Graph) -> str:
    """Return why a graph has no product for the pass, or ""; spelled as the model has it, or in ATen ops."""
    for node in graph.nodes:
        if view.kind(node) in _PRODUCTS and any(map(_is_weight, node.all_input_nodes)):
            return ""
    return "no product but those of linear layers reads a weight"


def _is_weight(node: fx.Node) -> bool:
    node = view.behind_views(node)
    value = value_of(node)
    if node.op != "placeholder" or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.ndim > 1 and all(type(size) is int for size in value.shape)  # an input's sizes are open


def _refusal(match: Any) -> str | None:
    """Return why a product is none of rows with one matrix, or None."""
    if scales := {name: value for name, value in match.output_node().kwargs.items() if value != 1}:
        return f"it scales what it adds: {scales}"  # Inductor's matcher leaves out keywords that the pattern lacks
    weight = value_of(match.kwargs["weight"])
    if not weight.is_floating_point():
        return f"the weight is {weight.dtype}"
    if weight.ndim == 3 and weight.shape[0] != 1:  # a constant's size, so a number
        return f"it multiplies {weight.shape[0]} batches, each by a matrix of its own"
    bias = value_of(match.kwargs["bias"]) if "bias" in match.kwargs else None
    if bias is not None and bias.shape != weight.shape[-1:]:
        return f"what it adds has shape {tuple(bias.shape)}, not one number for each column"
    return None


def _lift(match: Any, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> None:
    """Replace a product by the op, on the weight turned round; `bmm`'s one batch stays a dimension of x."""
    product = match.output_node()
    graph = product.graph

    def add(target: Any, *args: Any) -> fx.Node:
        node: fx.Node = graph.call_function(target, args)
        set_value(node, target(*(value_of(each) if isinstance(each, fx.Node) else each for each in args)), product)
        return node

    with graph.inserting_before(product):
        matrix = add(torch.ops.aten.select.int, weight, 0, 0) if value_of(weight).ndim == 3 else weight
        turned = add(torch.ops.aten.t.default, matrix)
        lifted = graph.call_function(LINEAR.overload, (x, turned, bias))
    lifted.meta = dict(product.meta)
    product.replace_all_uses_with(lifted)
    graph.erase_node(product)


def _pattern(name: str) -> Any:
    from torch._inductor.pattern_matcher import CallFunction, KeywordArg

    operands = ("bias", "x", "weight") if name == "addmm" else ("x", "weight")
    return CallFunction(getattr(torch.ops.aten, name).default, *map(KeywordArg, operands))


class _Products(nn.Module):
    """A product in each spelling, one of them with a weight of three dimensions, and one by a weight turned round."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(61)

        def numbers(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / 6)

        self.added, self.bias, self.plain = numbers(40, 56), numbers(56), numbers(56, 33)
        self.heads, self.turned = numbers(33, 4, 12), numbers(21, 48)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.added).view(*x.shape[:-1], -1).tanh()
        heads = torch.einsum("bsi,ihd->bshd", rows @ self.plain, self.heads)
        return torch.matmul(heads.flatten(2), self.turned.t())


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield the products for some rows and for one."""
    for rows in (3, 1):
        yield _Products(), (torch.randn(2, rows, 40, generator=torch.Generator().manual_seed(62)),)


LIFT_PRODUCTS = Pass(
    name="lift_products",
    does="Make every product with a bound weight, spelled as no linear layer, the op of linear layers.",
    mechanism="inductor",
    stage="aten",
    patterns=tuple(
        InductorGraphPattern(
            pattern=lambda name=name: _pattern(name),  # type: ignore[misc]
            handler=_lift,
            check=_refusal,
            bound=("weight", "bias") if name == "addmm" else ("weight",),
        )
        for name in ("addmm", "mm", "bmm")
    ),
    guards=Guards(constants=True, implements=frozenset({LINEAR.qualified_name}), nothing=nothing),
    examples=examples,
    owner="core_cpu",
    traits=PassTraits(reads_content=False),
)
