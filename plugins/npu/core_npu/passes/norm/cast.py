"""Fuse `npu_add_rms_norm` and casts of its result to fp32 to `npu_add_rms_norm_cast`, which gives both.

Routers of mixtures read the normed values in fp32, the experts as they are. The cast is exact, and so is the fusion.
"""

from __future__ import annotations

import torch
from torch import fx

from core.common.passes import Guards, NearMiss, Pass, PassContext, Site, near_miss, view
from core_npu.passes.calls import called, op, read, result_of, results
from core_npu.passes.conditions import HALVES, aligned_rows, first_reason, not_row, same_tensors
from core_npu.passes.inlined import Caller, Inputs, call_site
from core_npu.passes.norm.examples import cast_norms
from core_npu.passes.norm.normed import ADD_NORM, flattens
from core_npu.passes.streams import streams


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the norm whose first result a node reads off, and the casts of that."""
    call = result_of(node, ADD_NORM)
    casts = [] if call is None else [*_casts(node), *(c for user in node.users if flattens(user) for c in _casts(user))]
    if call is None or not casts:
        return None
    given, found = read(call), results(call)
    reason = first_reason(
        same_tensors(context, given["x1"], given["x2"]),
        aligned_rows(context, given["x1"]),
        not_row("gamma", given["gamma"], given["x1"]),
        "" if found is not None and len(found[0]) == 1 else f"{call} is used otherwise than by its results, each once",
    )
    return near_miss(node, reason) if reason else _site(node, call, casts)


def _casts(value: fx.Node) -> list[fx.Node]:
    """Return the casts of a value to fp32; empty if the value is fp32."""
    if view.dtype(value) not in HALVES:
        return []
    return [user for user in value.users if view.source_of_cast(user) is value and view.dtype(user) == torch.float32]


def _site(node: fx.Node, call: fx.Node, casts: list[fx.Node]) -> Site:
    given, readers = read(call), results(call) or {}
    rank = len(view.shape(node) or ())
    outputs = [(node, 1), *((cast, 0) for cast in casts)]
    outputs += [(user, index + 1) for index in (1, 2) for user in readers.get(index, ())]

    def make(caller: Caller, inputs: Inputs) -> fx.Node:
        return caller(op("npu_add_rms_norm_cast"), *inputs.values(), given["epsilon"])

    inputs = {name: given[name] for name in ("x1", "x2", "gamma")}
    joined = [cast for cast in casts if len(view.shape(cast) or ()) != rank]
    return call_site(inputs, make, outputs, interior=(call,), joined=joined, rank=rank)


def expect(context: PassContext) -> int | None:
    """Count norms of halves of which a value in fp32 of the same shape is made; None where writes or streams are."""
    if context.analysis("writes").all_written or streams(context.graph):
        return None
    norms = [node for node in context.graph.nodes if called(node) == ADD_NORM]
    if any(flattens(user) for norm in norms for value in norm.users for user in value.users):
        return None
    wide = [
        {value for user in value.users if view.kind(user) == "cast" and view.dtype(user) == torch.float32}
        for norm in norms
        for value in (results(norm) or {}).get(0, ())
        if not aligned_rows(context, value)
    ]
    return sum(bool(values) for values in wide)


FUSE_ADD_RMS_NORM_CAST = Pass(
    name="fuse_npu_add_rms_norm_cast",
    find=find,
    does="Fuse every norm of a sum that is read in fp32.",
    guards=Guards(scopes=streams, dtypes=HALVES),
    after=(
        *("eliminate_common_subexpressions", "fuse_npu_add_rms_norm"),
        *("fuse_npu_add_rms_norm_quant", "fuse_npu_add_rms_norm_dynamic_quant"),
    ),
    expect=expect,
    examples=cast_norms,
    owner="npu",
)
