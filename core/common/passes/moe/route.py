"""Lift the choice of experts, from a router's logits to weights and indices, to `core::moe_route`.

The matcher starts at the top-k and reads in both directions: back to the logits (route_scores.py), on through
normalisation, scale and cast to the weights. Everything after a step that the op does not have stays in the graph.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from core.common.ops.moe import MOE_ROUTE
from core.common.passes import NearMiss, Pass, PassContext, Refused, Site, near_miss, view
from core.common.passes.moe.route_scores import Ranking, is_last, read_ranking, top_k


@dataclass(slots=True)
class _Weights:
    """What has been read so far: `end` holds the weights, `nodes` are all nodes on the way."""

    end: fx.Node
    nodes: list[fx.Node]
    renormalize: bool = False
    eps: float = 0.0
    scale: float = 1.0


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the routing around a top-k, a near-miss for a routing that the op can't express, or None for any other
    top-k."""
    if view.kind(node) != "topk":
        return None
    values, indices = _output(node, 0), _output(node, 1)
    gathers = [] if indices is None else [u for u in indices.users if _gathers(u, indices)]
    source = values if values is not None and values.users else None
    if indices is None or not indices.users or (source is None and not gathers):
        return None  # groups of experts, a mask of what attention sees, a threshold for sampling
    try:
        return _site(node, source, gathers, indices)
    except Refused as refused:
        return near_miss(refused.node, refused.reason)


def _output(node: fx.Node, index: int) -> fx.Node | None:
    found = [user for user in node.users if view.kind(user) == "getitem" and user.args[1] == index]
    return found[0] if len(found) == 1 else None


def _gathers(node: fx.Node, indices: fx.Node) -> bool:
    return view.kind(node) == "gather" and view.operand(node, 2, "index") is indices


def _site(top: fx.Node, values: fx.Node | None, gathers: list[fx.Node], indices: fx.Node) -> Site:
    k, ranked = top_k(top), top.args[0]
    if k is None or not isinstance(ranked, fx.Node):
        raise Refused(top, f"{top} does not take a fixed number of the largest of the last dimension")
    if len(view.shape(ranked) or ()) != 2:
        raise Refused(top, f"{top} ranks {view.shape(ranked)}, not experts by tokens")
    ranking = read_ranking(ranked)
    weights = _source(top, values, gathers, ranking)
    compute = _score_selected(weights, ranking) if not ranking.scoring else ranking.compute_dtype
    if view.dtype(weights.end) != compute:
        raise Refused(weights.end, f"the weights {weights.end} are {view.dtype(weights.end)}, the scores {compute}")
    _read_on(weights)
    nodes = [*ranking.nodes, top, indices, *weights.nodes]
    return Site(
        anchor=weights.end,
        target=MOE_ROUTE.overload,
        args=(ranking.logits, k),
        kwargs={
            "scoring": ranking.scoring or "softmax_selected",
            "bias": ranking.bias,
            "renormalize": weights.renormalize,
            "renormalize_eps": weights.eps,
            "scale": weights.scale,
            "num_groups": ranking.num_groups,
            "top_groups": ranking.top_groups,
            "scored_per_group": ranking.scored_per_group,
            "sorted": view.operand(top, 4, "sorted", True) is not False,
            "compute_dtype": compute,
            "out_dtype": view.dtype(weights.end),
        },
        interior=tuple(dict.fromkeys(nodes)),
        outputs=(weights.end, indices),
    )


def _source(top: fx.Node, values: fx.Node | None, gathers: list[fx.Node], ranking: Ranking) -> _Weights:
    """Return the selected scores: the values of the top-k, or the scores gathered at its indices."""
    own = [node for node in gathers if node.args[0] is ranking.scores and is_last(node, 1)]
    if values is None and len(own) == 1:
        _check_hidden(top, ranking)
        return _Weights(own[0], [own[0]])
    if values is None:
        raise Refused(
            gathers[0], f"{gathers[0]} gathers from {gathers[0].args[0]}, not from the scores that are ranked"
        )
    if gathers:
        raise Refused(top, f"{top} hands out values, and {gathers[0]} gathers others by its indices")
    if ranking.bias is not None:
        raise Refused(top, f"the weights {values} contain the bias {ranking.bias}")
    _check_hidden(top, ranking)
    return _Weights(values, [values])


def _check_hidden(top: fx.Node, ranking: Ranking) -> None:
    """Raise unless hidden experts rank below all others: at minus infinity, or at 0 below scores that are positive."""
    if ranking.hidden != -math.inf and not (ranking.hidden == 0 and ranking.scoring and ranking.bias is None):
        raise Refused(top, f"hidden experts rank {ranking.hidden}, which may be above others")


def _score_selected(weights: _Weights, ranking: Ranking) -> torch.dtype | None:
    """Read the softmax of the k selected logits and return the dtype it is computed in."""
    softmax = view.only_user(weights.end)
    if softmax is None or view.kind(softmax) != "softmax" or not is_last(softmax, 1):
        raise Refused(weights.end, f"the selected logits {weights.end} do not become weights by a softmax alone")
    compute = view.dtype(softmax)
    if not view.is_exact(view.dtype(ranking.logits), compute):
        raise Refused(softmax, f"{softmax} is computed in {compute}, its logits are {view.dtype(ranking.logits)}")
    weights.nodes.append(softmax)
    weights.end = softmax
    return compute


def _read_on(weights: _Weights) -> None:
    """Go on through normalisation, scale and cast, each only if nothing else uses what is before it."""
    _skip_same(weights)
    _read_normalisation(weights)
    _skip_same(weights)
    product = view.only_user(weights.end)
    if product is not None and (view.kind(product) == "mul" or product.target is operator.imul):
        factor: Any = next((b for a, b in view.orders(product) if a is weights.end), None)
        if view.is_number(factor) and view.dtype(product) == view.dtype(weights.end):
            weights.scale = float(factor)
            _take(weights, product)
    cast = view.only_user(weights.end)
    if cast is not None and view.source_of_cast(cast) is weights.end:
        _take(weights, cast)


def _take(weights: _Weights, *nodes: fx.Node) -> None:
    weights.nodes += nodes
    weights.end = nodes[-1]


def _skip_same(weights: _Weights) -> None:
    """Go past casts to the dtype the weights have, if arithmetic follows; the last one is the op's own."""
    cast = view.only_user(weights.end)
    if cast is None or view.source_of_cast(cast) is not weights.end or view.dtype(cast) != view.dtype(weights.end):
        return
    _take(weights, cast)


def _read_normalisation(weights: _Weights) -> None:
    """Match `w / (w.sum(-1, keepdim=True) + eps)`, in place or not; any other division is left to the graph."""
    whole = weights.end
    users = list(whole.users)
    total = next((u for u in users if view.kind(u) == "sum"), None)
    quotient = next((u for u in users if view.kind(u) == "div" or u.target is operator.itruediv), None)
    if total is None or quotient is None or len(users) != 2 or quotient.args[0] is not whole:
        return
    keeps = view.operand(total, 2, "keepdim", False) is True and "dtype" not in total.kwargs
    if not keeps or not is_last(total, 1) or quotient.kwargs or view.dtype(quotient) != view.dtype(whole):
        return
    divisor, eps, shifted = quotient.args[1], 0.0, []
    plus = view.plus_number(divisor)
    if plus is not None and isinstance(divisor, fx.Node):
        shifted = [divisor]
        divisor, eps = plus
    if divisor is not total:
        return
    weights.renormalize, weights.eps = True, eps
    _take(weights, total, *shifted, quotient)


LIFT_MOE_ROUTE = Pass(name="lift_moe_route", find=find, does="Lift every choice of experts.")
