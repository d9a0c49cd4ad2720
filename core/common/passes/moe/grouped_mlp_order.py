"""How a mixture sorts its tokens by expert, and how it puts the experts' results back in order and sums them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from core.common.passes import NearMiss, Refused, near_miss, same_sizes, view

_FLATTEN = ("reshape", "view", "flatten")


@dataclass(frozen=True, slots=True)
class Order:
    """Tokens x (T, D) once per chosen expert, sorted by expert.

    experts: the expert of each row. permutation: where each row comes from. offsets: where each expert's rows end.
    elsewhere: a column that marks rows of experts that are not here; such rows become 0.
    """

    x: fx.Node
    indices: fx.Node
    experts: fx.Node
    permutation: fx.Node
    offsets: fx.Node
    top_k: int
    elsewhere: fx.Node | None
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """The weighted sum over each token's experts. end: the result."""

    end: fx.Node
    weights: fx.Node
    nodes: tuple[fx.Node, ...]


def read_order(rows: fx.Node, offsets: Any, num_experts: Any, positions: Mapping[fx.Node, int]) -> Order:
    """Read `x[sort(indices).indices // k]` and the ends of each expert's rows; raise `Refused` for other orders."""
    x, row = rows.args
    if not isinstance(x, fx.Node) or not isinstance(row, fx.Node) or len(view.shape(x) or ()) != 2:
        raise Refused(rows, f"{rows} chooses no rows of a matrix of tokens")
    permutation, top_k = _token_of_row(row)
    ordered = permutation.args[0] if view.kind(permutation) == "getitem" and permutation.args[1] == 1 else None
    if not isinstance(ordered, fx.Node) or view.kind(ordered) != "sort" or not _ascending(ordered):
        raise Refused(permutation, f"{permutation} is no order by expert")
    flat = ordered.args[0]
    indices = flat.args[0] if view.kind(flat) in _FLATTEN and isinstance(flat, fx.Node) else None
    if not isinstance(indices, fx.Node) or (view.shape(indices) or ())[1:] != (top_k,) or not isinstance(flat, fx.Node):
        raise Refused(ordered, f"{ordered} does not sort the {top_k} experts of each token")
    experts = [u for u in ordered.users if view.kind(u) == "getitem" and u.args[1] == 0]
    if len(experts) != 1 or not isinstance(offsets, fx.Node):
        raise Refused(ordered, f"{ordered} sorts experts that are read {len(experts)} times, not once")
    counted = _count(offsets, experts[0], num_experts)
    elsewhere, marked = _elsewhere(experts[0], num_experts, counted[-2], positions)
    cleared = [u for u in rows.users if u.target == "masked_fill_" and is_cleared(u, rows, elsewhere)]
    nodes = (flat, ordered, permutation, experts[0], row, rows, *counted, *marked, *cleared)
    return Order(x, indices, experts[0], permutation, offsets, top_k, elsewhere, nodes)


def is_cleared(node: fx.Node, rows: fx.Node, elsewhere: fx.Node | None) -> bool:
    """Tell whether a node sets the marked ones among rows to 0."""
    return elsewhere is not None and node.args == (rows, elsewhere, 0.0) and not node.kwargs


def _elsewhere(
    experts: fx.Node, num_experts: Any, counted: fx.Node, positions: Mapping[fx.Node, int]
) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return (the column that marks experts beyond the last, nodes); such indices are clamped in place afterwards."""
    mark = next((u for u in experts.users if u.target is operator.ge and u.args == (experts, num_experts)), None)
    column = view.only_user(mark) if mark is not None else None
    cut = next((u for u in experts.users if u.target == "clamp_"), None)
    if cut is not None:
        read = [counted, *([mark] if mark is not None else [])]
        late = all(positions[node] < positions[cut] for node in read)
        if not late or dict(cut.kwargs) != {"max": num_experts - 1} or len(cut.args) != 1 or cut.users:
            raise Refused(cut, f"{cut} changes the experts before they are counted, or otherwise than at the last one")
    found = [node for node in (mark, cut) if node is not None]
    if mark is None or view.kind(column) != "unsqueeze" or view.operand(column, 1, "dim") not in (-1, 1):  # type: ignore[arg-type]
        return None, found
    return column, [*found, column]  # type: ignore[list-item]  # a node, as its kind says


def _token_of_row(row: fx.Node) -> tuple[fx.Node, int]:
    """Return (p, k) of `p // k`."""
    whole = view.kind(row) == "floor_divide"
    # Positions are never negative, so that rounding down and towards zero are the same.
    whole = whole or (view.kind(row) == "div" and row.kwargs.get("rounding_mode") in ("floor", "trunc"))
    permutation, top_k = (*row.args, None)[:2] if whole else (None, None)
    if not isinstance(permutation, fx.Node) or not isinstance(top_k, int):
        raise Refused(row, f"{row} is no position divided by the number of experts of a token")
    return permutation, top_k


def _ascending(node: fx.Node) -> bool:
    one = len(view.shape(node.args[0]) or ()) == 1
    return one and view.operand(node, 2, "descending", False) is False and "stable" not in node.kwargs


def _count(offsets: fx.Node, experts: fx.Node, num_experts: Any) -> tuple[fx.Node, ...]:
    """Return the nodes of `cumsum(histc(experts, E, 0, E - 1))`."""
    counts = offsets.args[0] if view.kind(offsets) == "cumsum" else None
    if not isinstance(counts, fx.Node) or view.kind(counts) != "histc":
        raise Refused(offsets, f"{offsets} is no running count of rows by expert")
    low, high = (view.operand(counts, 2 + i, name) for i, name in enumerate(("min", "max")))
    if (view.operand(counts, 1, "bins"), low, high) != (num_experts, 0, num_experts - 1):
        raise Refused(counts, f"{counts} does not count the rows of {num_experts} experts")
    source: Any = counts.args[0]
    as_number = isinstance(source, fx.Node) and source is not experts and source.args[:1] == (experts,)
    if source is not experts and not (as_number and source.target in ("float", "int", "to")):
        raise Refused(counts, f"{counts} counts {source}, not {experts}")
    return (*((source,) if source is not experts else ()), counts, offsets)


def read_sum(out: fx.Node, order: Order, writer: fx.Node | None = None) -> Sum:
    """Match the way from the experts' rows to the sum per token: weight, restore the order, sum; else raise `Refused`.

    writer: a node that writes the rows before they are read, not counted as a reader.
    """
    product = _following(out, ("mul",), writer)
    column = view.other(product, out)
    weights, weight_nodes = _weights(column, product, order)
    restored = _following(product, ("getitem",))
    if restored.args[0] is not product:
        raise Refused(restored, f"{restored} does not put {product} back in order")
    inverse = _inverse(restored.args[1], restored, order)
    by_token = _following(restored, ("view", "reshape", "unflatten"))
    total = _following(by_token, ("sum",))
    shape = view.shape(by_token) or ()
    tokens = (view.shape(order.x) or (None,))[0]
    if not same_sizes(shape[:2], (tokens, order.top_k)) or view.operand(total, 1, "dim") not in (1, -2, [1], (1,)):
        raise Refused(total, f"{total} does not sum over the experts of each token")
    if view.operand(total, 2, "keepdim", False) is True or "dtype" in total.kwargs:
        raise Refused(total, f"{total} keeps the dimension it sums over, or sums in another dtype")
    nodes = [*weight_nodes, product, *inverse, restored, by_token, total]
    end, cast = total, view.only_user(total)
    if cast is not None and view.source_of_cast(cast) is total:
        nodes.append(cast)
        end = cast
    return Sum(end, weights, tuple(nodes))


def _following(node: fx.Node, kinds: tuple[str, ...], writer: fx.Node | None = None) -> fx.Node:
    users = [user for user in node.users if user is not writer]
    if len(users) != 1 or view.kind(users[0]) not in kinds:
        names = ", ".join(each.name for each in users) or "nothing"
        raise Refused(node, f"{node} is used by {names}, where one {kinds[0]} should follow")
    return users[0]


def _weights(column: Any, product: fx.Node, order: Order) -> tuple[fx.Node, list[fx.Node]]:
    """Return (weights (T, k), nodes) of `weights.reshape(-1)[permutation].unsqueeze(-1)`."""
    sorted_weights: Any = column.args[0] if view.kind(column) == "unsqueeze" else None
    is_row = view.kind(sorted_weights) == "getitem" and sorted_weights.args[1] is order.permutation
    flat: Any = sorted_weights.args[0] if is_row else None
    weights = flat.args[0] if view.kind(flat) in _FLATTEN else None
    if not isinstance(weights, fx.Node) or not view.same_shape(weights, order.indices):
        raise Refused(product, f"{product} multiplies by {column}, not by the weights in the order of the experts")
    if view.operand(column, 1, "dim") not in (-1, 1):
        raise Refused(column, f"{column} is no column")
    return weights, [flat, sorted_weights, column]


def _inverse(index: Any, restored: fx.Node, order: Order) -> list[fx.Node]:
    """Return the nodes of the permutation's inverse, by sorting it or by writing positions."""
    if isinstance(index, fx.Node) and index.target in ("argsort", torch.argsort) and index.args == (order.permutation,):
        return [index]
    writes = [u for u in index.users if u.args[:1] == (index,) and u is not restored] if _is_empty(index) else []
    write = writes[0] if len(writes) == 1 else None
    positions = write.args[2] if write is not None and len(write.args) == 3 else None
    name = str(getattr(write.target, "__name__", "")) if write is not None else ""
    if write is None or name != "setitem" or write.args[1] is not order.permutation or not _is_count(positions):
        raise Refused(restored, f"{index} does not put the rows back in order")
    return [index, positions, write]


def _is_empty(node: Any) -> bool:
    return isinstance(node, fx.Node) and getattr(node.target, "__name__", node.target) in ("empty_like", "zeros_like")


def _is_count(node: Any) -> bool:
    """Tell whether a node is `arange(n)` from 0 in steps of 1; the write itself requires a fitting n."""
    return isinstance(node, fx.Node) and node.target is torch.arange and len(node.args) == 1


def other_form(node: fx.Node) -> NearMiss | None:
    """Return a near-miss for experts that are not computed in order of the experts, None for other nodes."""
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    if name in ("index_add", "index_add_") and len(node.args) == 4:
        row = node.args[2]
        by_expert = _divided(row) is not None and view.kind(_divided(row)) == "getitem"
        if by_expert and view.kind(_divided(row).args[0]) == "sort":  # type: ignore[union-attr]  # a node
            return near_miss(node, f"{node} adds up rows that are divided among experts by counts that are data")
    if name != "bmm" or len(node.args) != 2:
        return None
    kinds = [name for operand in node.args for name in _origins(operand)]
    if "repeat" in kinds:
        return near_miss(node, f"{node} multiplies every token by every expert")
    if "repeat_interleave" in kinds:
        return near_miss(node, f"{node} multiplies each token by matrices of its experts, copied for it")
    return None


def _divided(row: Any) -> fx.Node | None:
    try:
        return _token_of_row(row)[0] if isinstance(row, fx.Node) else None
    except Refused:
        return None


def _origins(operand: Any) -> list[str]:
    """Name what an operand comes from, past views, weights and casts."""
    names = []
    for _ in range(4):
        if not isinstance(operand, fx.Node) or not operand.args:
            break
        names.append(str(getattr(operand.target, "__name__", operand.target)))
        operand = operand.args[0]
    return names
