"""The way back from attention's softmax to its product of query and key: scale, soft-cap, masks and sinks on the way.

Models differ in what they do to the scores and in which order. All of it is brought to one form,
`softmax(softcap(scale * query @ key.T) + masks)`: what is scaled after a mask was added scales the mask as well.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from core.common.passes import Refused, view
from core.common.passes.attention.operands import times_number

LOWEST = -1e30
"""Any score at or below this hides its position: whatever is added to such a score is lost in rounding."""

PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
"""The kinds of node that may multiply query and key."""

_IN_PLACE: dict[Any, str] = {operator.iadd: "add", operator.imul: "mul", operator.itruediv: "div"}
_IN_PLACE |= {"add_": "add", "mul_": "mul", "div_": "div", "masked_fill_": "masked_fill"}
_LOOKED_THROUGH = ("cast", "contiguous", "clone", "reshape", "view", "unflatten", "flatten")


@dataclass(frozen=True, slots=True)
class Mask:
    """One mask: a tensor added to the scores, times factor, or a boolean one.

    shown: the value of a boolean mask that keeps a score. fill: the number that replaces all other scores. rank: the
    rank of the scores that the mask was applied to.
    """

    node: fx.Node
    rank: int
    factor: float = 1.0
    shown: bool | None = None
    fill: float = 0.0


@dataclass(slots=True)
class Scores:
    """What has been read: `product` multiplies query and key, masks come in the order of their application."""

    product: fx.Node | None = None
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[Mask] = field(default_factory=list)
    sinks: fx.Node | None = None
    heads: list[Any] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)


def read_scores(node: fx.Node) -> Scores:
    """Return the scores that the softmax reads at `node`; raises `Refused` for a step that the op can't express."""
    scores = Scores()
    _read(_read_sinks(node, scores), scores, 1.0)
    scores.masks.reverse()
    return scores


def _read_sinks(node: fx.Node, scores: Scores) -> fx.Node:
    """Go back behind `cat([scores, sinks], -1)`, and behind `x - x.max()`, which changes no softmax."""
    current = node
    while (source := _shifted(current, scores) or _cast(current, scores)) is not None:
        current = source
    parts: Any = current.args[0] if view.kind(current) == "cat" else None
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return current
    width = view.shape(parts[1])
    if view.operand(current, 1, "dim", 0) not in (-1, len(width or ()) - 1) or width is None or width[-1] != 1:
        raise Refused(current, f"{current} joins scores with more than one column")
    scores.nodes.append(current)
    scores.sinks = parts[1]
    return parts[0]  # type: ignore[no-any-return]  # fx does not type arguments


def _shifted(node: fx.Node, scores: Scores) -> fx.Node | None:
    if view.kind(node) != "sub" or len(node.args) != 2 or node.kwargs:
        return None
    source, top = node.args
    nodes = [node]
    while isinstance(top, fx.Node) and (view.kind(top) == "getitem" or top.target is getattr):
        nodes.append(top)
        top = top.args[0]
    rank = len(view.shape(source) or ())
    if not isinstance(source, fx.Node) or view.kind(top) not in ("max", "amax") or top.args[0] is not source:  # type: ignore[union-attr]
        return None
    nodes.append(top)  # type: ignore[arg-type]  # it has a kind
    if view.operand(top, 1, "dim") not in (-1, rank - 1):  # type: ignore[arg-type]  # likewise
        return None
    scores.nodes += nodes
    return source


def _cast(node: fx.Node, scores: Scores) -> fx.Node | None:
    source = view.source_of_cast(node)
    if source is not None:
        scores.nodes.append(node)
    return source


def kind_of(node: fx.Node) -> str:
    """Return the kind of a step, also of an in-place one; `fuse` checks that nobody else sees its write."""
    return _IN_PLACE.get(node.target) or view.kind(node)


def _read(node: fx.Node, scores: Scores, factor: float) -> None:
    """Go back from a node that enters the softmax's input multiplied by `factor`."""
    while (kind := kind_of(node)) not in PRODUCTS:
        _note_heads(node, scores)
        scores.nodes.append(node)
        if kind in _LOOKED_THROUGH or _is_floor(node, kind):
            node = _first(node)
        elif (scaled := times_number(node, kind)) is not None:
            node, factor = scaled[0], factor * scaled[1]
        elif kind == "tanh" and not scores.softcap:
            scores.softcap, factor, node = factor, 1.0, _first(node)
        elif kind == "masked_fill":
            node = _read_fill(node, (view.operand(node, 1, "mask"), _first(node)), factor, scores, shown=False)
        elif kind == "where" and len(node.args) == 3:
            node = _read_where(node, factor, scores)
        elif kind == "add":
            _read_sum(node, scores, factor)
            return
        else:
            raise Refused(node, f"no argument of the op stands for {node}")
    _note_heads(node, scores)
    _read_product(node, scores, factor)


def _is_floor(node: fx.Node, kind: str) -> bool:
    """Tell whether a node clamps scores from below at a number so low that it still hides a score."""
    if kind not in ("max", "maximum", "clamp", "clamp_min") or view.operand(node, 2, "max") is not None:
        return False
    bound = number_of(view.operand(node, 1, "other" if kind.startswith("max") else "min"))
    return bound is not None and bound <= LOWEST


def _first(node: fx.Node) -> fx.Node:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        raise Refused(node, f"{node} names its operand in an unknown way")
    return source


def _note_heads(node: fx.Node, scores: Scores) -> None:
    """Note the number of heads of the scores, if they have four dimensions."""
    sizes = view.shape(node)
    if sizes is None or len(sizes) not in (3, 4):
        raise Refused(node, f"the scores {node} have {len(sizes or ())} dimensions")
    if len(sizes) == 4:
        scores.heads.append(sizes[1])


def _read_sum(node: fx.Node, scores: Scores, factor: float) -> None:
    """Read the operand that comes from a product; the other one is a mask or a bias."""
    failed: Refused | None = None
    for source, mask in view.orders(node):
        if not isinstance(source, fx.Node) or not view.same_shape(source, node):
            continue
        attempt = copy.copy(scores)
        attempt.masks, attempt.nodes, attempt.heads = [*scores.masks], [*scores.nodes], [*scores.heads]
        try:
            _add_mask(attempt, node, mask, factor)
            _read(source, attempt, factor)
        except Refused as refused:
            # The operand that was followed further back gives the clearer reason.
            failed = refused if failed is None or view.kind(failed.node) == "" else failed
            continue
        for name in ("product", "scale", "softcap", "masks", "heads", "nodes"):
            setattr(scores, name, getattr(attempt, name))
        return
    raise failed or Refused(node, f"{node} is no sum of scores and a mask")


def _add_mask(scores: Scores, node: fx.Node, mask: Any, factor: float) -> None:
    if scores.softcap:
        raise Refused(node, f"{node} adds a mask before the soft-cap")
    kind = view.dtype(mask)
    if kind is None or not kind.is_floating_point:
        raise Refused(node, f"{node} adds {mask}, which is no floating-point tensor")
    scores.masks.append(Mask(mask, len(view.shape(node) or ()), factor))


def _read_where(node: fx.Node, factor: float, scores: Scores) -> fx.Node:
    condition, first, second = node.args
    if number_of(second) is not None:
        return _read_fill(node, (condition, first), factor, scores, shown=True)
    return _read_fill(node, (condition, second), factor, scores, shown=False)


def _read_fill(node: fx.Node, operands: tuple[Any, Any], factor: float, scores: Scores, *, shown: bool) -> fx.Node:
    """Read `masked_fill` or `where`: scores where the condition equals `shown`, a number elsewhere."""
    condition, source = operands
    values = [number_of(value) for value in (*node.args[1:], node.kwargs.get("value"))]
    number = next((value for value in values if value is not None), None)
    if number is None or not isinstance(source, fx.Node) or not isinstance(condition, fx.Node):
        raise Refused(node, f"{node} fills in something else than a number")
    if scores.softcap:
        raise Refused(node, f"{node} applies a mask before the soft-cap")
    fill = number * factor
    if fill > LOWEST or (fill < torch.finfo(torch.float32).min and fill != -float("inf")):
        raise Refused(node, f"{node} fills in {fill}, which hides a score only where others are shown")
    if view.dtype(condition) != torch.bool or not view.same_shape(source, node):
        raise Refused(node, f"{node} does not choose between scores and a number by a boolean mask")
    scores.nodes += [value for value in node.all_input_nodes if value not in (condition, source)]
    scores.masks.append(Mask(condition, len(view.shape(node) or ()), shown=shown, fill=fill))
    return source


def number_of(value: Any) -> float | None:
    """Return a number, also one that the graph wraps in a tensor without dimensions; None for anything else."""
    if isinstance(value, fx.Node) and value.target in (torch.tensor, torch.scalar_tensor):
        value = value.args[0]
    elif isinstance(value, fx.Node) and value.target is torch.full and value.args[0] in ((), []):
        value = view.operand(value, 1, "fill_value")
    return float(value) if view.is_number(value) else None


def _read_product(node: fx.Node, scores: Scores, factor: float) -> None:
    if view.kind(node) == "baddbmm":
        beta, alpha = (view.operand(node, index, name, 1) for index, name in ((3, "beta"), (4, "alpha")))
        if not view.is_number(beta) or not view.is_number(alpha):
            raise Refused(node, f"{node} scales by something else than a number")
        bias = node.args[0]
        if isinstance(bias, fx.Node) and bias.target is torch.zeros and view.only_user(bias) is node:
            scores.nodes.append(bias)
        elif beta:
            _add_mask(scores, node, bias, factor * beta)
        factor *= alpha
    scores.nodes.append(node)
    scores.product = node
    scores.scale = factor * (scores.softcap or 1.0)
