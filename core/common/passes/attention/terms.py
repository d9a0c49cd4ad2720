"""The two products of attention, spelled as matmul, bmm, baddbmm or einsum: what they multiply, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.passes import Refused, same_size, same_sizes, view

Steps = list[tuple[str, tuple[Any, ...]]]
Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """Two operands. orders: permutations of lhs, of rhs, and of the op's result; empty if none is needed.

    is_matmul: the last two dimensions are multiplied as matrices, so keys are transposed there.
    """

    lhs: fx.Node
    rhs: fx.Node
    orders: tuple[Order, Order, Order] = ((), (), ())
    is_matmul: bool = True


def read_scores_product(node: fx.Node) -> Product:
    """Return query and key of `query @ key.T`; an einsum's are brought to (B, H, T, D) and (B, H, S, D)."""
    if view.kind(node) != "einsum":
        return Product(*_factors(node))
    lhs, rhs, out, operands = _equation(node)
    if len(out) == 4 and out[2] in rhs:
        lhs, rhs, operands = rhs, lhs, operands[::-1]
    summed = [letter for letter in lhs if letter not in out]
    wanted = [(*out[:3], *summed), (*out[:2], out[3], *summed)] if len(out) == 4 else []
    if len(summed) != 1 or not wanted or not _match((lhs, rhs), wanted):
        raise Refused(node, f"{node} is no product of queries and keys per head")
    orders = (_order(lhs, wanted[0]), _order(rhs, wanted[1]), ())
    return Product(operands[0], operands[1], orders, is_matmul=False)


def read_values_product(node: fx.Node, weights: fx.Node) -> Product:
    """Return weights and value of `weights @ value`; an einsum's value is brought to (B, H, S, V)."""
    if view.kind(node) != "einsum":
        return Product(*_factors(node))
    lhs, rhs, out, operands = _equation(node)
    if operands[0] is not weights:
        lhs, rhs, operands = rhs, lhs, operands[::-1]
    free = [letter for letter in rhs if letter not in lhs]
    wanted = [(*lhs[:2], lhs[3], *free), (*lhs[:3], *free)] if len(lhs) == 4 else []
    if len(free) != 1 or not wanted or not _match((rhs, out), wanted):
        raise Refused(node, f"{node} is no product of weights and values per head")
    orders = ((), _order(rhs, wanted[0]), _order("".join(wanted[1]), out))
    return Product(operands[0], operands[1], orders, is_matmul=False)


def multiplies(node: fx.Node, weights: fx.Node) -> bool:
    """Tell whether a node multiplies the attention weights (its first operand) with something else."""
    if view.kind(node) in ("matmul", "bmm"):
        return bool(node.args) and node.args[0] is weights
    return view.kind(node) == "einsum" and weights in _einsum_operands(node)


def result_of(product: fx.Node, order: Order, heads: Any) -> tuple[fx.Node, list[fx.Node], Steps]:
    """Return the node that holds attention's result, the nodes on the way to it, and its permutation of (B, H, T,
    V)."""
    sizes = view.shape(product) or ()
    if order:
        return product, [], [("permute", order)]
    if len(sizes) == 4 or heads is None:
        return product, [], []
    user = view.only_user(product)
    wide = view.shape(user) or ()
    split = user is not None and view.kind(user) in ("reshape", "view", "unflatten") and len(wide) == 4
    if user is not None and split and same_size(wide[1], heads) and same_sizes(wide[2:], sizes[1:]):
        return user, [product], []
    return product, [], [("flatten", (0, 1))]


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    names = {"baddbmm": ((1, "batch1"), (2, "batch2")), "bmm": ((0, "input"), (1, "mat2"))}
    first, second = (view.operand(node, *name) for name in names.get(view.kind(node), ((0, "input"), (1, "other"))))
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        raise Refused(node, f"{node} multiplies {first} and {second}")
    return first, second


def _einsum_operands(node: fx.Node) -> tuple[Any, ...]:
    operands: Any = node.args[1:]
    return tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else tuple(operands)


def _equation(node: fx.Node) -> tuple[str, str, str, tuple[fx.Node, ...]]:
    equation, operands = str(node.args[0]).replace(" ", ""), _einsum_operands(node)
    terms, _, out = equation.partition("->")
    factors = terms.split(",")
    letters = [*factors, out]
    plain = all(term.isalpha() and len(set(term)) == len(term) for term in letters)
    if len(factors) != 2 or len(operands) != 2 or not plain or not all(isinstance(each, fx.Node) for each in operands):
        raise Refused(node, f"{node} computes {equation!r}")
    return factors[0], factors[1], out, operands


def _match(terms: Sequence[str], wanted: Sequence[Sequence[str]]) -> bool:
    return all(sorted(term) == sorted(letters) for term, letters in zip(terms, wanted, strict=True))


def _order(given: str, wanted: Sequence[str]) -> Order:
    """Return the permutation that brings named dimensions into the wanted order; empty if they already are."""
    order = tuple(given.index(letter) for letter in wanted)
    return () if order == tuple(range(len(order))) else order
