"""Fuse a residual add and `npu_rms_norm` of the sum to `npu_add_rms_norm`, which gives the sum too.

Models written for the device call the fused op where one module holds both; where the add stands at the end of a layer
and the norm at the beginning of the next, they do not. What follows the norm (quantisation, a cast) fuses further.
"""

from __future__ import annotations

from torch import fx

from core.common.passes import Guards, NearMiss, Pass, PassContext, Site, near_miss, view
from core_npu.passes.calls import called, op, read, results
from core_npu.passes.conditions import HALVES, aligned_rows, first_reason, not_row, same_tensors
from core_npu.passes.inlined import Caller, Inputs, call_site
from core_npu.passes.norm.examples import sums
from core_npu.passes.streams import streams


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the norm at a node and the add before it."""
    if called(node) != "npu_rms_norm":
        return None
    given = read(node)
    total = given["input"]
    if not isinstance(total, fx.Node):
        return None
    if total.op == "call_method" and total.target == "add_":
        return near_miss(node, f"{total} adds in place")
    if view.kind(total) != "add" or not all(isinstance(term, fx.Node) for term in total.args):
        return None
    if len(total.args) != 2 or total.kwargs:
        return near_miss(node, f"{total} scales what it adds")
    norms = [user for user in total.users if called(user) == "npu_rms_norm"]
    if node is not norms[0]:
        return near_miss(node, f"{norms[0]} norms {total} too, and takes the add")
    reason = _refusal(context, total, given["gamma"], node)
    return near_miss(node, reason) if reason else _site(node, total, given["gamma"], given["epsilon"])


def _refusal(context: PassContext, total: fx.Node, gamma: fx.Node, norm: fx.Node) -> str:
    first, second = total.args
    assert isinstance(first, fx.Node)
    return first_reason(
        same_tensors(context, first, second),
        aligned_rows(context, total),
        not_row("gamma", gamma, total),
        "" if results(norm) else f"{norm} is used otherwise than by its results",
    )


def _site(norm: fx.Node, total: fx.Node, gamma: fx.Node, epsilon: float) -> Site:
    readers = results(norm) or {}
    # y, then the factor of the norm where somebody reads it, then the sum.
    outputs = [*((reader, index) for index in sorted(readers) for reader in readers[index]), (total, 2)]
    first, second = total.args
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)

    def call(caller: Caller, given: Inputs) -> fx.Node:
        return caller(op("npu_add_rms_norm"), *given.values(), epsilon)

    return call_site({"x1": first, "x2": second, "gamma": gamma}, call, outputs, interior=(total, norm))


def expect(context: PassContext) -> int | None:
    """Count independently: sums of two like tensors that a norm reads; None if the graph has writes or streams."""
    if context.analysis("writes").all_written or streams(context.graph):
        return None
    return sum(_is_owed(context, node) for node in context.graph.nodes if view.kind(node) == "add")


def _is_owed(context: PassContext, total: fx.Node) -> bool:
    if len(total.args) != 2 or total.kwargs or same_tensors(context, *total.args) or aligned_rows(context, total):
        return False
    norm = next((user for user in total.users if called(user) == "npu_rms_norm"), None)
    return norm is not None and bool(norm.users) and not not_row("gamma", read(norm)["gamma"], total)


FUSE_ADD_RMS_NORM = Pass(
    name="fuse_npu_add_rms_norm",
    find=find,
    does="Fuse every add and the norm of its sum.",
    guards=Guards(scopes=streams, dtypes=HALVES),
    expect=expect,
    examples=sums,
    owner="npu",
)
