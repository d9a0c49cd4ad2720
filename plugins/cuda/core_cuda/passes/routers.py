"""Multiply rows and a weight that a model casts to fp32 as they are, in one launch with sums in fp32.

Routers of DeepSeek-V3 and GLM-4.5 do so: a cast of the rows, one of the whole weight, and a product that reads twice as
many bytes, in each step.
"""

from __future__ import annotations

import torch
from torch import fx

from core.common.ops.linear import LINEAR
from core.common.passes import Guards, NearMiss, Pass, PassContext, PassTraits, Site, near_miss, value_of, view
from core_cuda.ops.linear.widened import why_not, widened_linear
from core_cuda.passes.examples.mixture import routers


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return a linear layer of rows and a constant weight that are both cast to fp32."""
    if view.kind(node) != "linear" or view.dtype(node) != torch.float32:
        return None
    casts = view.operand(node, 0, "input"), view.operand(node, 1, "weight")
    x, weight = map(view.source_of_cast, casts)
    if x is None or weight is None or view.dtype(x) not in (torch.bfloat16, torch.float16):
        return None
    if len(view.shape(weight) or ()) != 2:
        return near_miss(node, f"{weight} has shape {view.shape(weight)}")
    if view.dtype(weight) != view.dtype(x):
        return near_miss(node, f"{x} is {view.dtype(x)}, {weight} is {view.dtype(weight)}")
    assert context.constants is not None  # the guard has seen to it
    if context.constants.value(weight) is None or context.analysis("writes").writers(weight):
        return near_miss(node, f"{weight} is no constant, which the kernel may read before earlier work is done")
    call = {"x": value_of(x), "weight": value_of(weight), "bias": view.operand(node, 2, "bias")}
    if reason := why_not(LINEAR.bind((), call)):
        return near_miss(node, reason)
    return Site(anchor=node, target=widened_linear, args=(x, weight), interior=(*casts, node))


WIDEN_ROUTERS = Pass(
    name="widen_routers",
    does="Multiply rows and a weight that a model casts to fp32 as they are, with sums in fp32.",
    find=find,
    owner="core_cuda",
    after=("remove_no_ops", "eliminate_common_subexpressions", "merge_linears", "lift_linear"),
    guards=Guards(constants=True),
    examples=routers,
    traits=PassTraits(reads_content=False),
)
