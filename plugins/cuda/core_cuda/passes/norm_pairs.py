"""Join two RMSNorms that do not need each other's results into one launch.

Where a model norms query and key over all heads at once (OLMo 2 and 3, MiniMax M2), after their rotation (Hunyuan), in
layers without one (EXAONE 4), or where it norms the compressed rows of both (DeepSeek), the norms stay apart from the
attention: two launches side by side, each of which takes longer to start than to run in a decode step. Norms of single
heads before a rotation are not seen here: they are inside `core::rotary_attention` by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.ops.norm import RMS_NORM
from core.common.passes import LIFTS, NearMiss, Pass, PassContext, Site, find_op, near_miss, view
from core_cuda.ops.norm.pair import two_rms_norms, why_not
from core_cuda.passes.examples.dense import norm_pairs
from core_cuda.passes.taking import given, refusal

_OWN = ("x", "weight")
"""The arguments in which the two norms may differ."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What a norm reads: a node, or some columns of a node, which the graph cuts out too late."""

    node: fx.Node
    columns: tuple[int, int] | None = None


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return this norm and the next one, where neither needs the other; a near-miss where one kernel can't do both."""
    if find_op(node.target) is not RMS_NORM or node in context.taken:
        return None
    found = _next(context, node)
    if found is None:
        return None
    other, part = found
    reason = refusal(node, why_not) or refusal(other, why_not) or _difference(node, other)
    if reason:
        return near_miss(node, reason)
    context.taken.update((node, other))
    first, second = given(node), given(other)
    rounding = {name: value for name, value in first.items() if name not in (*_OWN, "eps")}
    args = (first["x"], part.node, first["weight"], second["weight"])
    ends = (node, other)
    if part.columns is None:
        return Site(
            anchor=node,
            target=two_rms_norms,
            args=(*args, first["eps"]),
            kwargs=rounding,
            interior=ends,
            outputs=ends,
        )
    weighted = first["weight"] is not None
    cut = _cut(part.columns, first["eps"], rounding, weighted=weighted)
    return Site(anchor=node, target=cut, args=args if weighted else args[:2], interior=ends, outputs=ends)


def _next(context: PassContext, node: fx.Node) -> tuple[fx.Node, _Part] | None:
    """Return the next norm of the graph and what it reads, where that is there before this one's result is needed."""
    order = context.analysis("order")
    needed = min((order[user] for user in node.users), default=order[node])
    following: fx.Node = node.next
    while following.op != "root" and find_op(following.target) is not RMS_NORM:
        following = following.next
    if following.op == "root" or not following.users:
        return None
    x = given(following)["x"]
    if any(order[each] >= needed for each in following.all_input_nodes if each is not x):
        return None
    parts = (_Part(x), _columns(x))
    part = next((each for each in parts if each is not None and order[each.node] < needed), None)
    return None if part is None else (following, part)


def _columns(x: fx.Node) -> _Part | None:
    """Return the columns of the node that x is a part of, split along its last dimension; None where x is none."""
    split = x.args[0] if view.kind(x) == "getitem" else None
    if not isinstance(split, fx.Node) or view.kind(split) != "split" or not isinstance(x.args[1], int):
        return None
    source, sizes = split.args[0], view.operand(split, 1, "split_size_or_sections")
    sizes = view.operand(split, 1, "split_size") if sizes is None else sizes
    last = len(view.shape(source) or ()) - 1
    if view.operand(split, 2, "dim", 0) not in (-1, last) or not isinstance(source, fx.Node):
        return None
    if not isinstance(sizes, (list, tuple)) or any(type(size) is not int for size in sizes):
        return None
    begin = sum(sizes[: x.args[1]])
    return _Part(source, (begin, begin + sizes[x.args[1]]))


def _cut(columns: tuple[int, int], eps: float, rounding: Mapping[str, Any], *, weighted: bool) -> fx.GraphModule:
    """Return the two norms, the second one of these columns of its input."""
    begin, end = columns

    def with_weights(x: Any, y: Any, x_weight: Any, y_weight: Any) -> Any:
        made = two_rms_norms(x, y[..., begin:end], x_weight, y_weight, eps, **rounding)
        return made[0], made[1]

    def without(x: Any, y: Any) -> Any:
        made = two_rms_norms(x, y[..., begin:end], None, None, eps, **rounding)
        return made[0], made[1]

    return fx.symbolic_trace(with_weights if weighted else without)


def _difference(node: fx.Node, other: fx.Node) -> str:
    """Return how the other norm rounds otherwise, or ""."""
    first, second = given(node), given(other)
    for name in first:
        if name not in _OWN and first[name] != second[name]:
            return f"{node} has {name} {first[name]}, and {other} beside it has {second[name]}"
    if (first["weight"] is None) != (second["weight"] is None):
        return f"one of {node} and {other} beside it has no weight"
    return ""


JOIN_RMS_NORMS = Pass(
    name="join_rms_norms",
    does="Join two RMSNorms that do not need each other's results into one launch.",
    find=find,
    owner="core_cuda",
    after=("eliminate_common_subexpressions", "merge_linears", "fuse_rotary_attention", *LIFTS),
    examples=norm_pairs,
)
