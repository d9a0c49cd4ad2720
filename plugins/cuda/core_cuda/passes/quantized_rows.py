"""Quantise rows once that two layers quantise in different shapes.

In DeepSeek-V3 and GLM-4.5 the routed experts read rows (T, D) that are a view of the shared expert's input (B, S, D).
A scale for each token is the same in both, so one quantisation serves the two. `eliminate_common_subexpressions` joins
equal calls only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import fx

from core.common.ops.quantize import QUANTIZE
from core.common.passes import NearMiss, Pass, PassContext, Site, calls, find_op, near_miss, view
from core_cuda.passes.examples.mixture import quantised_twice
from core_cuda.passes.taking import given


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the quantisation of rows and that of what they are a view of."""
    if find_op(node.target) is not QUANTIZE:
        return None
    call = given(node)
    source = call["x"].args[0] if view.kind(call["x"]) in ("view", "reshape") else None
    if not isinstance(source, fx.Node) or len(view.shape(call["x"]) or ()) != 2:
        return None
    other = next((user for user in source.users if find_op(user.target) is QUANTIZE), None)
    if other is None or not context.taken.isdisjoint((node, other)):
        return None
    size = (view.shape(call["x"]) or (0,))[-1]
    if type(size) is not int or (view.shape(source) or (0,))[-1] != size:
        return near_miss(node, f"{call['x']} cuts the rows of {source} otherwise")
    theirs = given(other)
    for name in call.keys() - {"x"}:
        if call[name] != theirs[name]:
            return near_miss(node, f"{other} quantises {source} with {name} {theirs[name]}, not {call[name]}")
    if call["granularity"] != "token" or call["scale"] is not None:
        return near_miss(node, f"{node} makes no scale for each token by itself")
    outputs = (*calls.outputs(other), *calls.outputs(node))
    if reason := _reason(context, source, call["x"], [each for each in outputs if each is not None]):
        return near_miss(node, reason)
    anchor = next((each for each in outputs if each is not None), None)
    if anchor is None:
        return None
    context.taken.update((node, other))
    return Site(
        anchor=anchor,
        target=_in_both_shapes(call["dtype"], size),
        args=(source,),
        interior=(other, node, *(each for each in outputs if each is not None)),
        outputs=outputs,
    )


def _reason(context: PassContext, source: fx.Node, rows: fx.Node, outputs: list[fx.Node]) -> str:
    """Return why results of both shapes cannot share memory, or the rows are no view, or ""."""
    writes = context.analysis("writes")
    if writes.of(rows) != writes.of(source):
        return f"{rows} is a copy of {source}"
    if writes.writers(*outputs):
        return "a result is written later"
    if writes.of(*outputs) & writes.of(*context.graph.output_node().all_input_nodes):
        return "a result is returned"
    return ""


@lru_cache
def _in_both_shapes(dtype: torch.dtype, size: int) -> fx.GraphModule:
    """Return codes and scales of x (..., size), as they are and as rows."""

    def quantize(x: Any) -> Any:
        made = torch.ops.core.quantize.default(x, None, dtype=dtype)
        return made[0], made[1], made[0].view(-1, size), made[1].view(-1, 1)

    return fx.symbolic_trace(quantize)


SHARE_QUANTIZED_ROWS = Pass(
    name="share_quantized_rows",
    does="Quantise rows once that two layers quantise in different shapes.",
    find=find,
    owner="core_cuda",
    after=("eliminate_common_subexpressions", "fuse_rms_norm_quantize", "fuse_add_rms_norm_quantize"),
    examples=quantised_twice,
)
