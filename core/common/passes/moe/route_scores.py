"""What a router ranks, read back from its top-k: groups of experts, the bias that only selects, scores, logits."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from core.common.passes import Refused, view


@dataclass(slots=True)
class Ranking:
    """The experts' scores and what selects among them.

    scores: the node that holds the scores, or the logits themselves where only the selected ones are scored (scoring is
    "" then). nodes: all nodes read. hidden: the rank that experts outside the best groups get.
    """

    logits: fx.Node
    scores: fx.Node
    scoring: str
    compute_dtype: torch.dtype
    bias: fx.Node | None = None
    num_groups: int = 0
    top_groups: int = 0
    scored_per_group: int = 2
    hidden: float = -math.inf
    nodes: list[fx.Node] = field(default_factory=list)


def read_ranking(ranked: fx.Node) -> Ranking:
    """Match what a top-k over experts ranks; raise `Refused` if the op can't express it."""
    groups = _read_groups(ranked) if view.kind(ranked) == "masked_fill" else None
    chosen = groups.choice if groups is not None else ranked
    scores, bias = _without_bias(chosen)
    scoring, source = _scoring(scores)
    compute = view.dtype(scores)
    logits, casts = view.without_exact_casts(source)
    if compute is None or not view.is_exact(view.dtype(logits), compute):
        raise Refused(scores, f"{logits} is {view.dtype(logits)} and scored in {compute}")
    found = Ranking(logits, scores if scoring else source, scoring, compute, bias, nodes=[*casts])
    found.nodes += scoring_nodes(scores, scoring)
    if bias is not None:
        _check_bias(chosen, scores, bias)
        found.nodes.append(chosen)
    if groups is not None:
        found.num_groups, found.top_groups, found.scored_per_group = groups.sizes
        found.hidden = groups.hidden
        found.nodes += [*groups.nodes, ranked]
    return found


def _without_bias(chosen: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return (scores, bias of one number per expert), or (chosen, None) where nothing is added."""
    experts = (view.shape(chosen) or (None,))[-1:]
    for scores, bias in view.orders(chosen) if view.kind(chosen) == "add" else ():
        if isinstance(scores, fx.Node) and isinstance(bias, fx.Node) and view.shape(bias) == experts:
            return scores, bias
    return chosen, None


def _check_bias(chosen: fx.Node, scores: fx.Node, bias: fx.Node) -> None:
    kinds = view.dtype(scores), view.dtype(bias)
    if None in kinds or torch.promote_types(*kinds) != view.dtype(chosen):  # type: ignore[arg-type]  # not None
        raise Refused(chosen, f"{chosen} is {view.dtype(chosen)}, its operands {kinds[0]} and {kinds[1]}")


def _scoring(scores: fx.Node) -> tuple[str, fx.Node]:
    """Return (the op's name of the scoring function, the logits); ("", scores) if no scoring function was applied."""
    found = view.kind(scores)
    if found == "sigmoid":
        return "sigmoid", scores.args[0]  # type: ignore[return-value]  # a function of one tensor
    if found == "softmax" and is_last(scores, 1):
        return "softmax", scores.args[0]  # type: ignore[return-value]
    inner = scores.args[0] if found == "sqrt" else None
    if isinstance(inner, fx.Node) and view.kind(inner) == "softplus" and len(inner.args) == 1 and not inner.kwargs:
        return "sqrtsoftplus", inner.args[0]  # type: ignore[return-value]
    return "", scores


def scoring_nodes(scores: fx.Node, scoring: str) -> list[fx.Node]:
    """Return the nodes that turn logits into scores."""
    if scoring == "sqrtsoftplus":
        return [scores.args[0], scores]  # type: ignore[list-item]  # read by _scoring
    return [scores] if scoring else []


def is_last(node: fx.Node, index: int) -> bool:
    """Tell whether a node works on the last dimension of its first argument only."""
    rank = len(view.shape(node.args[0]) or ())
    dim = view.operand(node, index, "dim")
    return bool(rank) and (dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim) in (-1, rank - 1)


@dataclass(slots=True)
class _Groups:
    """Experts outside the best groups, hidden from the top-k. choice: what is ranked without them."""

    choice: fx.Node
    sizes: tuple[int, int, int]
    hidden: float
    nodes: list[fx.Node]


def _read_groups(ranked: fx.Node) -> _Groups:
    """Read `choice.masked_fill(~group_mask.bool(), hidden)` and how the groups were chosen."""
    choice, mask, hidden = (view.operand(ranked, i, name) for i, name in enumerate(("input", "mask", "value")))
    if not isinstance(choice, fx.Node) or not isinstance(mask, fx.Node) or not view.is_number(hidden):
        raise Refused(ranked, f"{ranked} hides experts by {mask} with {hidden}")
    nodes: list[fx.Node] = []
    wide = _kept(mask, nodes)
    per_group = _only_arg(wide, ("reshape", "view", "flatten"), nodes)
    column = _only_arg(per_group, ("expand",), nodes)
    flags = _only_arg(column, ("unsqueeze",), nodes)
    num_groups, size = (view.shape(per_group) or (0, 0, 0))[1:3]
    if (view.shape(wide) or (0,))[1:] != (num_groups * size,) or (view.shape(column) or (0,))[1:] != (num_groups, 1):
        raise Refused(wide, f"{wide} does not repeat one flag for each of a group's experts")
    best, marks = _marked(flags)
    top_groups, group_scores = _top(best, 1, nodes)
    scored, grouped = _group_scores(group_scores, nodes)
    sizes = (view.shape(grouped) or (0,))[1:]
    if _only_arg(grouped, ("view", "reshape"), nodes) is not choice or sizes != (num_groups, size):
        raise Refused(grouped, f"{grouped} does not group {choice} as {per_group} does")
    nodes += [flags, *marks]
    return _Groups(choice, (num_groups, top_groups, scored), float(hidden), nodes)


def _kept(mask: fx.Node, nodes: list[fx.Node]) -> fx.Node:
    """Return m of `~m` or `~m.bool()`."""
    kept = mask.args[0]
    if not (view.kind(mask) == "logical_not" or mask.target is operator.invert) or not isinstance(kept, fx.Node):
        raise Refused(mask, f"the mask {mask} of hidden experts is no negation")
    nodes.append(mask)
    as_bool = kept.target == "bool" or view.kind(kept) == "cast"
    source = kept.args[0] if as_bool else None
    if isinstance(source, fx.Node):
        nodes.append(kept)
        return source
    return kept


def _only_arg(node: fx.Node, kinds: tuple[str, ...], nodes: list[fx.Node]) -> fx.Node:
    source = node.args[0] if node.args else None
    if view.kind(node) not in kinds or not isinstance(source, fx.Node):
        raise Refused(node, f"{node} is no {' or '.join(kinds)} of a mask of groups")
    nodes.append(node)
    return source


def _marked(flags: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return (indices, nodes) of zeros in which these indices of the last dimension are set to one."""
    name = str(getattr(flags.target, "__name__", flags.target))
    writers = [user for user in flags.users if user.target == "scatter_"]
    scatter = writers[0] if len(writers) == 1 else None
    if not name.startswith(("zeros", "new_zeros")) or scatter is None:
        raise Refused(flags, f"{flags} is no zeros with the chosen groups set")
    dim, index, mark = scatter.args[1:4] if len(scatter.args) == 4 else (None, None, None)
    if dim not in (1, -1) or mark not in (1, 1.0, True) or not isinstance(index, fx.Node):
        raise Refused(scatter, f"{scatter} does not set the chosen groups to one")
    return index, [scatter]


def _top(member: fx.Node, output: int, nodes: list[fx.Node]) -> tuple[int, fx.Node]:
    """Return (k, x) where member is that output (0 values, 1 indices) of the top k of x's last dimension."""
    top = member.args[0] if view.kind(member) == "getitem" and member.args[1] == output else None
    if not isinstance(top, fx.Node) or view.kind(top) != "topk":
        raise Refused(member, f"{member} is no output of a top-k of groups")
    k, source = top_k(top), top.args[0]
    if k is None or not isinstance(source, fx.Node):
        raise Refused(top, f"{top} is no top-k of the last dimension")
    nodes += [member, top]
    return k, source


def top_k(node: fx.Node) -> int | None:
    """Return k of a top-k node that takes the k largest of its last dimension, else None."""
    k = view.operand(node, 1, "k")
    largest = view.operand(node, 3, "largest", True)
    rank = len(view.shape(node.args[0]) or ())
    last = view.operand(node, 2, "dim", -1) in (-1, rank - 1)
    return k if isinstance(k, int) and not isinstance(k, bool) and largest is True and last else None


def _group_scores(node: fx.Node, nodes: list[fx.Node]) -> tuple[int, fx.Node]:
    """Return (number of best experts that a group's score sums, the scores by group)."""
    if view.kind(node) == "getitem" and node.args[1] == 0 and isinstance(node.args[0], fx.Node):
        inner, best = node.args[0], node
    else:
        inner, best = node, None
    if inner.target in ("max", "amax", torch.max, torch.amax) and view.operand(inner, 1, "dim") in (-1, 2):
        nodes += [inner, *([best] if best is not None else [])]
        return 1, inner.args[0]  # type: ignore[return-value]  # a function of one tensor
    values = node.args[0] if view.kind(node) == "sum" else None
    if not isinstance(values, fx.Node) or view.operand(node, 1, "dim") not in (-1, 2, [-1], (-1,)):
        raise Refused(node, f"{node} is neither a sum of a group's best scores nor their maximum")
    if view.operand(node, 2, "keepdim", False) is True or "dtype" in node.kwargs:
        raise Refused(node, f"{node} keeps the dimension it sums over, or sums in another dtype")
    nodes.append(node)
    return _top(values, 0, nodes)
