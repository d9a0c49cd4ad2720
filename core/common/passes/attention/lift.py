"""Lift attention, as one `scaled_dot_product_attention` or written out, to `core::dense_attention`.

A softmax belongs to attention if its result multiplies values, with only casts and inactive dropout in between. From
there the matcher reads back to the product of query and key. The steps that it meets become the op's arguments; a mask
stays an operand. A step that the op has no argument for makes the site a near-miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from core.common.passes import (
    NearMiss,
    Pass,
    PassContext,
    Refused,
    Site,
    Writes,
    near_miss,
    same_size,
    same_sizes,
    view,
)
from core.common.passes.attention.operands import Operand, is_copy, peel
from core.common.passes.attention.scores import PRODUCTS, Mask, Scores, read_scores
from core.common.passes.attention.sinks import gate_of, per_head
from core.common.passes.attention.site import Attention, site_of
from core.common.passes.attention.terms import (
    Order,
    Product,
    multiplies,
    read_scores_product,
    read_values_product,
    result_of,
)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the attention around a softmax or a `scaled_dot_product_attention`, or why it can't be lifted."""
    kind = view.kind(node)
    if kind not in ("sdpa", "softmax", "_softmax"):
        return None
    try:
        if kind == "sdpa":
            return site_of(_single(context, node))
        weights = _weights(node)
        return None if weights is None else site_of(_written_out(context, weights))
    except Refused as refused:
        return near_miss(refused.node, refused.reason) if kind == "sdpa" or _is_product(node) else None


def _single(context: PassContext, node: fx.Node) -> Attention:
    """Read `scaled_dot_product_attention`."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    query, key, value, mask, dropout, causal = (view.operand(node, at, name) for at, name in enumerate(names))
    if dropout not in (None, 0, 0.0):
        raise Refused(node, f"{node} drops out {dropout} of the weights")
    size, scale = (view.shape(query) or (None,))[-1], node.kwargs.get("scale")
    if scale is None and isinstance(size, int):
        scale = size**-0.5
    if not view.is_number(scale) or not isinstance(causal, bool | None):
        raise Refused(node, f"{node} has no scale that is a number")
    factors = Product(query, key, is_matmul=False), Product(query, value)
    keys, values = _keys_and_values(_Reach(context, node), *factors)
    found = Attention(node, Operand(query), keys, values, float(scale), causal=causal is True)  # type: ignore[arg-type]  # a number, as asked
    rank = len(view.shape(node) or ())
    found.heads = view.shape(node)[1] if rank == 4 else None  # type: ignore[index]  # of rank 4
    found.masks = [] if mask is None else [_mask(node, mask, rank)]
    return found


def _mask(node: fx.Node, mask: Any, rank: int) -> Mask:
    if view.dtype(mask) is None:
        raise Refused(node, f"{node} is given a mask of unknown dtype")
    boolean = view.dtype(mask) == torch.bool
    return Mask(mask, rank, shown=True, fill=-float("inf")) if boolean else Mask(mask, rank)


class _Reach:
    """Tells which nodes come after the last write into query, key or value: only these may the op replace."""

    def __init__(self, context: PassContext, end: fx.Node) -> None:
        self._order: Mapping[fx.Node, int] = context.analysis("order")
        self._writes: Writes = context.analysis("writes")
        self._end = self._order[end]
        self._first = 0

    def __call__(self, node: fx.Node) -> bool:
        return self._order[node] >= self._first

    def start_after_writes_of(self, *nodes: fx.Node) -> bool:
        """Move the start behind the last write into these nodes; return whether that moved it."""
        places = [self._order[writer] + 1 for writer in self._writes.writers(*nodes)]
        before, self._first = self._first, max([self._first, *(at for at in places if at <= self._end)])
        return self._first > before


def _keys_and_values(reach: _Reach, first: Product, second: Product) -> tuple[Operand, Operand]:
    """Go back from the right operands of both products; skip the repetition of heads if it is the same in both."""

    def operands(repeats: bool) -> tuple[Operand, Operand]:
        options = {"scales": first.is_matmul, "transposes": first.is_matmul}
        keys = _operand(first.rhs, first.orders[1], reach, repeats=repeats, **options)
        return keys, _operand(second.rhs, second.orders[1], reach, repeats=repeats)

    found = operands(repeats=True)
    if reach.start_after_writes_of(*(operand.node for operand in found)):
        found = operands(repeats=True)
    sizes = [view.shape(operand.node) or () for operand in found]
    if not same_sizes(sizes[0][1:2], sizes[1][1:2]):
        found = operands(repeats=False)
    if first.is_matmul and not found[0].swapped:
        found[0].then("transpose", -1, -2)
    return found


def _operand(node: fx.Node, order: Order, reach: _Reach, **options: bool) -> Operand:
    if not order:
        return peel(node, reach, **options)
    found = Operand(node)
    found.then("permute", *order)
    return found


@dataclass(frozen=True, slots=True)
class _Weights:
    """The softmax, the product of its result with the values, and the nodes from one to the other."""

    softmax: fx.Node
    product: fx.Node
    nodes: tuple[fx.Node, ...]
    drops_sinks: bool


_LOOKED_THROUGH = ("cast", "reshape", "view", "flatten", "unflatten")


def _weights(softmax: fx.Node) -> _Weights | None:
    """Go on from a softmax over the last dimension to the product with the values; None where there is none."""
    rank = len(view.shape(softmax) or ())
    if view.operand(softmax, 1, "dim") not in (-1, rank - 1):
        return None
    nodes, drops = [softmax], False
    while True:
        current = nodes[-1]
        product = next((user for user in current.users if multiplies(user, current)), None)
        if product is not None:
            return _Weights(softmax, product, tuple(nodes), drops)
        user = view.only_user(current)
        if user is None:
            return None
        if _drops_last(user):
            drops = True
        elif view.kind(user) not in _LOOKED_THROUGH and not is_copy(user) and not _is_idle_dropout(user):
            return None
        nodes.append(user)


def _is_idle_dropout(node: fx.Node) -> bool:
    if view.kind(node) != "dropout":
        return False
    return view.operand(node, 1, "p") == 0 or view.operand(node, 2, "training", node.kwargs.get("train")) is False


def _drops_last(node: fx.Node) -> bool:
    """Tell whether a node takes `[..., :-1]`."""
    index: Any = node.args[1] if view.kind(node) == "getitem" else None
    return isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and index[1] == slice(None, -1, None)


def _written_out(context: PassContext, weights: _Weights) -> Attention:
    """Read attention from its softmax back to query and key, and on to the values."""
    source = weights.softmax.args[0]
    if not isinstance(source, fx.Node):
        raise Refused(weights.softmax, f"{weights.softmax} names its operand in an unknown way")
    scores = read_scores(source)
    if (scores.sinks is not None) != weights.drops_sinks:
        raise Refused(weights.softmax, "a column is joined to the scores, or dropped from the weights, but not both")
    assert scores.product is not None
    reach = _Reach(context, weights.product)
    first = read_scores_product(scores.product)
    second = read_values_product(weights.product, weights.nodes[-1])
    key, value = _keys_and_values(reach, first, second)
    query = _operand(first.lhs, first.orders[0], reach, repeats=False, scales=True)
    heads = _heads(scores, query)
    anchor, nodes, result = result_of(weights.product, second.orders[2], heads)
    found = Attention(anchor, query, key, value, scores.scale * query.scale * key.scale, heads=heads)
    found.softcap, found.masks, found.result = scores.softcap, scores.masks, result
    found.nodes = [*scores.nodes, *weights.nodes, *nodes]
    _read_sinks(found, scores, source, reach)
    _check_unused(found)
    return found


def _read_sinks(found: Attention, scores: Scores, source: fx.Node, reach: _Reach) -> None:
    if scores.sinks is not None:
        sizes = view.shape(scores.sinks) or ()
        if len(sizes) != 4:
            raise Refused(scores.sinks, f"the sinks {scores.sinks} have {len(sizes)} dimensions")
        found.sinks = per_head(scores.sinks, sizes[1], reach) or Operand(scores.sinks)
        return
    gate = gate_of(found.anchor, source, found.heads, reach) if not found.result else None
    if gate is not None:
        found.nodes.append(found.anchor)
        found.anchor, found.sinks = gate


def _heads(scores: Scores, query: Operand) -> Any:
    known = [*scores.heads, *([(view.shape(query.node) or (0, 0))[1]] if query.flat else [])]
    if not all(same_size(each, known[0]) for each in known):
        raise Refused(scores.nodes[-1], f"the scores have {sorted(set(map(str, known)))} heads in different places")
    return known[0] if known else None


def _check_unused(found: Attention) -> None:
    """Refuse an attention whose scores or weights another node reads: they would be computed twice."""
    sinks = found.sinks.nodes if found.sinks is not None else ()
    inside = {*found.nodes, found.anchor, *sinks, *(n for operand in found.operands for n in operand.nodes)}
    for node in found.nodes:
        outside = next((user for user in node.users if user not in inside), None)
        if outside is not None and node.all_input_nodes and node is not found.anchor:
            raise Refused(node, f"{outside} uses {node} as well")


def _is_product(node: fx.Node) -> bool:
    """Tell whether a softmax reads, a few steps back, a product of two computed tensors."""
    return any(view.kind(source) in PRODUCTS for source in _sources(node, 12))


def _sources(node: fx.Node, depth: int) -> Iterator[fx.Node]:
    reached, level = {node}, [node]
    for _ in range(depth):
        level = [source for each in level for source in each.all_input_nodes[:2] if source not in reached]
        level = [source for source in dict.fromkeys(level) if view.kind(source) != "linear"]
        reached.update(level)
        yield from level


LIFT_ATTENTION = Pass(name="lift_attention", find=find, does="Lift every attention.")
