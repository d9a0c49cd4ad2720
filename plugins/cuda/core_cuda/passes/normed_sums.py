"""Fuse an RMSNorm, the residual add of its result, and the norm of the sum where one follows, to one launch.

Models that norm what attention and MLP give (Gemma 2 and 3, OLMo 2 and 3, EXAONE 4, GLM-4) do so twice in a layer. In a
decode step each of these kernels takes longer to start than to run.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from core.common.ops.norm import ADD_RMS_NORM, RMS_NORM
from core.common.passes import LIFTS, NearMiss, Pass, PassContext, Site, calls, find_op, near_miss, view
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.norm.normed_sum import ROUNDING, normed_sum, normed_sum_rms_norm, why_not
from core_cuda.passes.examples.dense import normed_sums
from core_cuda.passes.taking import given, refusal


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the add of a normed tensor, with the norm of the sum; a near-miss where one kernel can't do it."""
    then = find_op(node.target) is ADD_RMS_NORM
    operands = _added(node, then=then)
    if operands is None or not view.same_shape(*operands):
        return None
    normed = next((each for each in operands if _is_norm(each)), None)
    if normed is None:
        return None
    if list(normed.users) != [node]:
        return near_miss(node, f"{normed} is used otherwise than in {node}")
    if reason := refusal(normed, why_not) or (refusal(node, why_not) if then else ""):
        return near_miss(node, reason)
    residual = operands[1] if operands[0] is normed else operands[0]
    if view.dtype(residual) not in DTYPES:
        return near_miss(node, f"{residual} is {view.dtype(residual)}, which the kernel does not take")
    first = given(normed)
    args = (first["x"], residual, first["weight"], first["eps"])
    rounding = {name: first[name] for name in ROUNDING}
    if not then:
        return Site(anchor=node, target=normed_sum, args=args, kwargs=rounding, interior=(normed, node))
    outputs = calls.outputs(node)
    anchor = next((each for each in outputs if each is not None), None)
    if anchor is None:
        return None
    second = given(node)
    return Site(
        anchor=anchor,
        target=normed_sum_rms_norm,
        args=(*args, second["weight"], second["eps"]),
        kwargs={**rounding, **{f"next_{name}": second[name] for name in ROUNDING}},
        interior=(normed, node),
        outputs=outputs,
    )


def _added(node: fx.Node, *, then: bool) -> tuple[Any, Any] | None:
    """Return the two tensors that a node adds, None where it does something else. then: it is `core::add_rms_norm`."""
    if then:
        call = given(node)
        return call["x"], call["residual"]
    return next(view.orders(node), None) if view.kind(node) == "add" else None


def _is_norm(node: Any) -> bool:
    return isinstance(node, fx.Node) and find_op(node.target) is RMS_NORM


FUSE_NORMED_SUM = Pass(
    name="fuse_normed_sum",
    does="Fuse every RMSNorm, the residual add of its result and the norm of the sum.",
    find=find,
    owner="core_cuda",
    after=("eliminate_common_subexpressions", "fuse_add_rms_norm_quantize", "fuse_all_reduce_norm", *LIFTS),
    examples=normed_sums,
)
