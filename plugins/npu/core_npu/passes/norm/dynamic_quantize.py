"""Fuse `npu_add_rms_norm`, a bias if there is one, and `npu_dynamic_quant` to `npu_add_rms_norm_dynamic_quant`.

With `output_mask` [True, False] the op computes one quantisation and leaves its second codes and scales empty; nothing
reads them. There is no op that does the same without an add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from core.common.passes import Guards, NearMiss, Pass, PassContext, PassTraits, Site, near_miss
from core_npu.passes.calls import INT8, called, op, read, results
from core_npu.passes.conditions import CODES, aligned_rows, first_reason, not_row, same_tensors
from core_npu.passes.inlined import Caller, Inputs, call_site
from core_npu.passes.norm.examples import dynamic_norms
from core_npu.passes.norm.normed import ADD_NORM, Normed, count_owed, normed
from core_npu.passes.streams import streams

_RANKS = range(2, 9)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the quantisation at a node and the norm before it."""
    if called(node) != "npu_dynamic_quant":
        return None
    given = read(node)
    found = normed(given["input"], node, ADD_NORM)
    if found is None:
        return None
    if isinstance(found, str):
        return near_miss(node, found)
    reason = first_reason(other_codes(given), _refusal(context, found, given["smooth_scales"]), unread(node))
    return near_miss(node, reason) if reason else _site(node, found, given["smooth_scales"])


def other_codes(given: Mapping[str, object]) -> str:
    """Return why a quantisation gives other codes than the fused op, or ""."""
    if given["group_index"] is not None:
        return "it smooths groups of rows apart"
    if given["dst_type"] not in INT8 or given["dst_type_max"]:
        return f"its codes are {given['dst_type']}, not int8"
    return "" if given["quant_mode"] == "pertoken" else f"it quantises {given['quant_mode']}, the fused op by token"


def _refusal(context: PassContext, found: Normed, smooth: fx.Node | None) -> str:
    given = found.given
    return first_reason(
        same_tensors(context, given["x1"], given["x2"]),
        aligned_rows(context, found.x),
        "" if found.rank in _RANKS else f"{found.x} has rank {found.rank}, the kernel takes 2 to 8",
        not_row("gamma", given["gamma"], found.x),
        not_row("the smooth scale", smooth, found.x),
    )


def unread(node: fx.Node) -> str:
    """Return why the results of a quantisation cannot be replaced one by one, or nothing."""
    found = results(node)
    return "" if found and set(found) <= {0, 1} else f"{node} is used otherwise than by its results"


def _site(node: fx.Node, found: Normed, smooth: fx.Node | None) -> Site:
    readers = results(node) or {}
    codes, scales = readers.get(0, ()), readers.get(1, ())
    outputs = [*((each, 0) for each in codes), *((each, 3) for each in scales), *((each, 2) for each in found.sums)]

    def call(caller: Caller, given: Inputs) -> fx.Node:
        return caller(
            op("npu_add_rms_norm_dynamic_quant"),
            *(given[name] for name in ("x1", "x2", "gamma")),
            smooth_scale1=given["smooth"],
            beta=given["beta"],
            epsilon=found.given["epsilon"],
            output_mask=[True, False],
        )

    inputs = {name: found.given[name] for name in ("x1", "x2", "gamma")} | {"smooth": smooth, "beta": found.beta}
    joined = (*codes, *scales) if found.flat else ()
    return call_site(inputs, call, outputs, interior=(*found.steps, node), joined=joined, rank=found.rank)


def expect(context: PassContext) -> int | None:
    """Count independently: norms whose values only one such quantisation reads, directly.

    None if a bias, a view, a write or a stream makes the count depend on the graph's order and shapes.
    """

    def refused(given: Mapping[str, Any], codes: Mapping[str, Any]) -> str:
        fits = aligned_rows(context, given["x1"]) or not_row("", codes["smooth_scales"], given["x1"])
        return first_reason(other_codes(codes), fits)

    return count_owed(context, "npu_dynamic_quant", refused)


FUSE_ADD_RMS_NORM_DYNAMIC_QUANT = Pass(
    name="fuse_npu_add_rms_norm_dynamic_quant",
    find=find,
    does="Fuse every norm of a sum whose values are quantised by token, and only that.",
    guards=Guards(scopes=streams, dtypes=CODES),
    after=("eliminate_common_subexpressions", "fuse_npu_add_rms_norm"),
    expect=expect,
    examples=dynamic_norms,
    owner="npu",
    traits=PassTraits(codes=("npu::npu_dynamic_quant",)),
)
