"""Sort the pairs of a quantised mixture by expert in one launch, and sum what its experts give in another.

`core.quantization` writes the experts of a mixture as two grouped products of rows sorted by expert. What sorts the
rows before, and weights and sums them behind, are small ops: ten and four launches in each layer, which in a decode
step take longer than the products.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from core.common.passes import Guards, NearMiss, Pass, PassContext, Replacement, Site, near_miss, value_of, view
from core.common.passes.values.sizes import same_size
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.moe.pairs import order_pairs, weighted_sum
from core_cuda.passes.examples.mixture import quantised_experts

_TOP_K = 64  # experts of a token; the sum is unrolled


def find_order(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the sort around a search for where each expert's pairs end."""
    if node.target is not torch.searchsorted or node.kwargs != {"right": True, "out_int32": True}:
        return None
    experts, each = node.args
    sort = _source(experts, operator.getitem)
    indices, num_experts = _sorted_indices(sort)
    if sort is None or indices is None or _source(experts, operator.getitem, 0) is None:
        return None
    if not sort.kwargs.get("stable"):
        return near_miss(node, f"{sort} may put pairs of one expert in another order each time")
    if _numbers(each) != num_experts:
        return near_miss(node, f"{each} does not count the {num_experts} experts")
    found = {user.args[1]: user for user in sort.users if user.target is operator.getitem}
    order = found.get(1)
    if len(sort.users) != 2 or order is None or list(found[0].users) != [node]:
        return near_miss(node, f"{sort} is used otherwise than for where experts end and for the order")
    tokens, places, between = _readers(order, int(value_of(indices).shape[1]))
    if len(between) != len(order.users):
        return near_miss(node, f"{order} is used otherwise than for the tokens and places of pairs")
    return Site(
        anchor=node,
        target=order_pairs,
        args=(indices, num_experts),
        interior=(*_interior(sort), *found.values(), *between, *(n for n in (places,) if n is not None), node),
        outputs=(node, tokens, places),
    )


def _source(node: Any, target: Any, index: int | None = None) -> fx.Node | None:
    """Return the first argument of a call of this function, with this second argument; else None."""
    if not isinstance(node, fx.Node) or node.target is not target:
        return None
    if index is not None and node.args[1] != index:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _sorted_indices(sort: Any) -> tuple[fx.Node | None, int]:
    """Return indices (T, k) and the number of experts of `sort(where(index of none, E, indices).flatten())`.

    The sort may be stable or not.
    """
    if not isinstance(sort, fx.Node) or sort.target is not torch.sort or len(sort.args) != 1:
        return None, 0
    if sort.kwargs.keys() - {"stable"}:
        return None, 0
    flat: Any = sort.args[0]
    where: Any = flat.args[0] if view.kind(flat) == "flatten" and len(flat.args) == 1 and not flat.kwargs else None
    if not isinstance(where, fx.Node) or where.target is not torch.where or len(where.args) != 3:
        return None, 0
    none, num_experts, indices = where.args
    if not isinstance(none, fx.Node) or none.target is not operator.or_ or not isinstance(num_experts, int):
        return None, 0
    low, high = ((each.target, each.args) if isinstance(each, fx.Node) else None for each in none.args)
    known = low == (operator.lt, (indices, 0)) and high == (operator.ge, (indices, num_experts))
    value = value_of(indices) if isinstance(indices, fx.Node) else None
    if not known or not isinstance(value, Tensor) or value.ndim != 2 or type(value.shape[1]) is not int:
        return None, 0
    return indices, num_experts  # type: ignore[return-value]  # a node, as its value says


def _interior(sort: fx.Node) -> tuple[fx.Node, ...]:
    flat: Any = sort.args[0]
    where = flat.args[0]
    none = where.args[0]
    return (*none.args, none, where, flat, sort)


def _numbers(node: Any) -> Any:
    """Return the n of `arange(n)`, a number or a node; None for anything else."""
    if not isinstance(node, fx.Node) or node.target is not torch.arange or len(node.args) != 1:
        return None
    return node.args[0] if set(node.kwargs) <= {"device"} else None


def _readers(order: fx.Node, top_k: int) -> tuple[fx.Node | None, fx.Node | None, list[fx.Node]]:
    """Return the token of each sorted pair, the place of each pair, and the nodes that read the order for these."""
    tokens = next((u for u in order.users if u.target is operator.floordiv and u.args == (order, top_k)), None)
    empty = next((u for u in order.users if u.target is torch.empty_like and u.args == (order,) and not u.kwargs), None)
    places = view.only_user(empty) if empty is not None else None
    if places is None or places.target != "scatter" or places.args[:3] != (empty, 0, order):
        return tokens, None, [tokens] if tokens is not None else []
    if _numbers(places.args[3]) is None:
        return tokens, None, [tokens] if tokens is not None else []
    return tokens, places, [each for each in (tokens, empty, places) if each is not None]


def _cast(rows: Any, places: Any, weights: Any, top_k: Any, size: Any, dtype: Any) -> Any:
    return (rows[places].view(-1, top_k, size) * weights[..., None]).sum(1).to(dtype)


def _uncast(rows: Any, places: Any, weights: Any, top_k: Any, size: Any) -> Any:
    return (rows[places].view(-1, top_k, size) * weights[..., None]).sum(1)


def _summed_and_cast(rows: Any, places: Any, weights: Any, dtype: Any) -> Any:
    return weighted_sum(rows, places, weights, out_dtype=dtype)


def _summed(rows: Any, places: Any, weights: Any) -> Any:
    return weighted_sum(rows, places, weights)


def _unfit(matched: Mapping[str, Any]) -> str | None:
    """Return why the kernel can't weight and sum what was matched, or None."""
    rows, places, weights = (value_of(matched[name]) for name in ("rows", "places", "weights"))
    if rows.ndim != 2 or weights.ndim != 2 or places.ndim != 1 or places.dtype != torch.int64:
        return f"{matched['rows']} are no rows of pairs that {matched['places']} finds"
    source = _source(matched["places"], operator.getitem)
    if matched["places"].target != "scatter" and (source is None or source.target is not order_pairs):
        return f"{matched['places']} may not be where each pair went"
    if not same_size(places.shape[0], weights.shape[0] * weights.shape[1]):
        return f"{matched['places']} and {matched['weights']} are of other pairs"
    if (weights.shape[1], rows.shape[1]) != (matched["top_k"], matched["size"]) or matched["top_k"] > _TOP_K:
        return f"{matched['rows']} are seen as {matched['top_k']} rows of {matched['size']} to a token"
    for name, dtype in (("rows", rows.dtype), ("weights", weights.dtype), ("result", matched.get("dtype"))):
        if dtype is not None and dtype not in DTYPES:
            return f"{name} are {dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    return None


def _nothing(graph: fx.Graph) -> str:
    """Return that a graph sums nothing: the matcher compares each node with each of the patterns' own."""
    return "" if any(view.kind(node) == "sum" for node in graph.nodes) else "nothing is summed"


_ORDER = ("remove_no_ops", "eliminate_common_subexpressions")
_LITERALS = ("top_k", "size")

SORT_EXPERT_PAIRS = Pass(
    name="sort_expert_pairs",
    does="Sort the pairs of token and expert of every quantised mixture in one launch.",
    find=find_order,
    owner="core_cuda",
    after=_ORDER,
    examples=quantised_experts,
)
SUM_EXPERT_ROWS = Pass(
    name="sum_expert_rows",
    does="Weight and sum the rows of every quantised mixture's experts in one launch.",
    mechanism="replace_pattern",
    patterns=(
        Replacement(pattern=_cast, replacement=_summed_and_cast, literals=(*_LITERALS, "dtype"), check=_unfit),
        Replacement(pattern=_uncast, replacement=_summed, literals=_LITERALS, check=_unfit),
    ),
    owner="core_cuda",
    after=_ORDER,
    guards=Guards(nothing=_nothing),
    examples=quantised_experts,
)
