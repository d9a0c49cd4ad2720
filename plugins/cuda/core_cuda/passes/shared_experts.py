"""Run the shared expert of a mixture beside the routed experts, on a second stream.

Qwen2 MoE, Qwen3-Next, DeepSeek and GLM have an expert that sees every token. Neither it nor the routed experts need the
other's result, and few tokens leave multiprocessors idle in both. In a captured graph they are two branches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from core.common.ops.canonical import GATED_LINEAR, GROUPED_MLP, LINEAR
from core.common.passes import LIFTS, Guards, NearMiss, Pass, PassContext, PassTraits, Site, find_op, near_miss, view
from core_cuda.ops.linear import products
from core_cuda.ops.moe.grouped_mlp import grouped_mlp_condition
from core_cuda.ops.moe.shared import PREFIX, experts_beside_shared
from core_cuda.passes.examples.mixture import shared_experts
from core_cuda.passes.taking import given, refusal

_ROUTED = ("x", "weights", "indices", "gate_up", "down")
_LAYER = ("x", "weight", "bias")


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the routed experts with the shared expert of the same tokens; a near-miss where kernels refuse either."""
    if find_op(node.target) is not GROUPED_MLP:
        return None
    routed = given(node)
    gated = next(_gated(view.behind_views(routed["x"])), None)
    if gated is None:
        return None
    down = view.only_user(gated)
    if down is None or find_op(down.target) is not LINEAR or given(down)["x"] is not gated:
        return near_miss(node, f"{gated} of the same tokens is used otherwise than in a linear layer")
    conditions = ((node, grouped_mlp_condition), (gated, products.why_not), (down, products.why_not))
    if reason := next((reason for each, why_not in conditions if (reason := refusal(each, why_not))), ""):
        return near_miss(node, reason)
    shared, last = given(gated), given(down)
    own = {name: value for name, value in routed.items() if name not in _ROUTED}
    beside = {f"{PREFIX}{name}": value for name, value in shared.items() if name not in _LAYER}
    return Site(
        anchor=node,
        target=experts_beside_shared,
        args=(*(routed[name] for name in _ROUTED), *(shared[name] for name in _LAYER), last["weight"], last["bias"]),
        kwargs={**own, **beside},
        interior=(node, gated, down),
        outputs=(node, down),
    )


def _gated(source: fx.Node) -> Iterator[fx.Node]:
    """Yield the gated linear layers that read a node, or views of it."""
    for user in source.users:
        if find_op(user.target) is GATED_LINEAR:
            yield user
        elif view.behind_views(user) is not user:
            yield from _gated(user)


OVERLAP_SHARED_EXPERTS = Pass(
    name="overlap_shared_experts",
    does="Run the shared expert of every mixture beside the routed experts, on a second stream.",
    find=find,
    owner="core_cuda",
    after=("merge_linears", "fuse_gate_up", "lift_linear", "fuse_gated_linear", *LIFTS),
    guards=Guards(dtypes=frozenset({torch.bfloat16, torch.float16})),
    examples=shared_experts,
    traits=PassTraits(
        on_request="it has not been timed on a GPU: both read weights, and gain only where neither fills the bandwidth"
    ),
)
