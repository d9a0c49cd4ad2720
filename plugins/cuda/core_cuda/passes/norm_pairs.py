"""Join two RMSNorms that do not need each other's results into one launch.

Where a model norms query and key over all heads at once (OLMo 2 and 3, MiniMax M2), after their rotation (Hunyuan), or
in layers without one (EXAONE 4), the norms stay apart from the attention: two launches side by side, each of which
takes longer to start than to run in a decode step. Norms of single heads before a rotation are not seen here: they are
inside `core::rotary_attention` by then.
"""

from __future__ import annotations

from torch import fx

from core.common.ops.norm import RMS_NORM
from core.common.passes import LIFTS, NearMiss, Pass, PassContext, Site, find_op, near_miss
from core_cuda.ops.norm.pair import two_rms_norms, why_not
from core_cuda.passes.examples import norm_pairs
from core_cuda.passes.taking import given, refusal

_OWN = ("x", "weight")
"""The arguments in which the two norms may differ."""


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return this norm and the next one, where neither needs the other; a near-miss where one kernel can't do both."""
    if find_op(node.target) is not RMS_NORM or node in context.taken:
        return None
    other = _next(context, node)
    if other is None:
        return None
    reason = refusal(node, why_not) or refusal(other, why_not) or _difference(node, other)
    if reason:
        return near_miss(node, reason)
    context.taken.update((node, other))
    first, second = given(node), given(other)
    rounding = {name: value for name, value in first.items() if name not in (*_OWN, "eps")}
    return Site(
        anchor=node,
        target=two_rms_norms,
        args=(first["x"], second["x"], first["weight"], second["weight"], first["eps"]),
        kwargs=rounding,
        interior=(node, other),
        outputs=(node, other),
    )


def _next(context: PassContext, node: fx.Node) -> fx.Node | None:
    """Return the next norm of the graph, where what it reads is there before this one's result is needed."""
    order = context.analysis("order")
    needed = min((order[user] for user in node.users), default=order[node])
    following: fx.Node = node.next
    while following.op != "root" and find_op(following.target) is not RMS_NORM:
        following = following.next
    if following.op == "root" or not following.users or any(order[x] >= needed for x in following.all_input_nodes):
        return None
    return following


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
