"""Fuse the squared ReLU of MLPs without a gate to one launch.

Nemotron, Nemotron-H and Arcee put it between their two projections, as two ops of torch: each reads and writes all rows
of a prompt, and is a launch in a decode step. In a gate, and in a mixture's experts, it is part of core's ops, whose
passes run before; of quantised experts it is left to this one.
"""

from __future__ import annotations

from torch import Tensor, fx

from core.common.passes import LIFTS, NearMiss, Pass, PassContext, Site, near_miss, value_of, view
from core.common.passes.mlp.activation_forms import read_activation
from core_cuda.ops.squared_relu import squared_relu, why_not
from core_cuda.passes.examples.dense import squared_relus


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the square of a ReLU; a near-miss where the kernel can't take it, or the ReLU is read elsewhere too."""
    found = read_activation(node)
    if found is None or found.kind != "relu2":
        return None
    x, relu = value_of(found.x), view.square(node)
    if relu is None or not isinstance(x, Tensor) or view.dtype(node) != x.dtype:
        return None
    if list(relu.users) != [node]:
        return near_miss(node, f"{relu} is used otherwise than in {node}")
    if reason := why_not(x):
        return near_miss(node, f"{found.x}: {reason}")
    return Site(anchor=node, target=squared_relu, args=(found.x,), interior=(relu, node))


FUSE_SQUARED_RELU = Pass(
    name="fuse_squared_relu",
    does="Fuse every ReLU, and its square, of MLPs without a gate.",
    find=find,
    owner="core_cuda",
    after=("eliminate_common_subexpressions", *LIFTS),
    examples=squared_relus,
)
