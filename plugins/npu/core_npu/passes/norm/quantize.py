"""Fuse a norm, a bias if there is one, and `npu_quantize` by given scales to the op that does them at once.

`npu_add_rms_norm` becomes `npu_add_rms_norm_quant`, with scales of each channel, divided or multiplied by as the model
has it: no reciprocal is taken, and scales of fp16 are widened, which is exact. `npu_rms_norm` becomes
`npu_rms_norm_quant`, which multiplies by one scale for all, and wants a bias and a zero point: where the model has
none, zeros are bound to the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from core.common.passes import (
    Guards,
    NearMiss,
    Pass,
    PassContext,
    PassTraits,
    Site,
    near_miss,
    set_value,
    value_of,
    view,
)
from core_npu.passes.calls import INT8, called, op, read
from core_npu.passes.conditions import (
    CODES,
    aligned_rows,
    first_reason,
    last_axis,
    not_row,
    one_scale,
    same_tensors,
    static_scales,
    widened,
)
from core_npu.passes.inlined import Caller, Inputs, call_site
from core_npu.passes.norm.examples import static_norms, static_norms_of_sums
from core_npu.passes.norm.normed import ADD_NORM, NORM, Normed, count_owed, normed
from core_npu.passes.streams import streams


def find_add(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the quantisation at a node and the norm of a sum before it."""
    found = _found(node, ADD_NORM)
    if not isinstance(found, Normed):
        return found
    given = read(node)
    reason = _refusal_add(context, found, given)
    return near_miss(node, reason) if reason else _add_site(node, found, given)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the quantisation at a node and the norm before it."""
    found = _found(node, NORM)
    if not isinstance(found, Normed):
        return found
    given = read(node)
    reason = _refusal(context, found, given)
    return near_miss(node, reason) if reason else _site(context, node, found, given["scales"])


def _found(node: fx.Node, norm: str) -> Normed | NearMiss | None:
    if called(node) != "npu_quantize":
        return None
    found = normed(read(node)["input"], node, norm)
    return near_miss(node, found) if isinstance(found, str) else found


def _refusal_add(context: PassContext, found: Normed, given: Mapping[str, Any]) -> str:
    x = found.given["x1"]
    multiplied_with_bias = found.beta is not None and not given["div_mode"]
    return first_reason(
        same_tensors(context, x, found.given["x2"]),
        aligned_rows(context, x),
        not_row("gamma", found.given["gamma"], x),
        _other_codes(given),
        static_scales(given["scales"], given["zero_points"], x, divides=given["div_mode"]),
        "with a bias the kernel divides by its scales, and these multiply" if multiplied_with_bias else "",
    )


def _refusal(context: PassContext, found: Normed, given: Mapping[str, Any]) -> str:
    return first_reason(
        aligned_rows(context, found.x),
        not_row("gamma", found.given["gamma"], found.x),
        _other_codes(given),
        "the kernel multiplies by its scale, and this one divides" if given["div_mode"] else "",
        one_scale(given["scales"], found.x),
        "" if given["zero_points"] is None else "the kernel's zero point is int8, this one of the scale's dtype",
    )


def _other_codes(given: Mapping[str, Any]) -> str:
    """Return why a quantisation gives other codes than the fused ops, or nothing."""
    if given["dtype"] not in INT8:
        return f"its codes are {given['dtype']}, not int8"
    return last_axis(given["axis"], given["input"])


def _add_site(node: fx.Node, found: Normed, given: Mapping[str, Any]) -> Site:
    def call(caller: Caller, inputs: Inputs) -> fx.Node:
        for name in ("scales", "zero_points"):
            wanted = widened(given[name])
            if wanted is not None:
                inputs[name] = caller(torch.Tensor.to, inputs[name], wanted)
        options = {"axis": -1, "epsilon": found.given["epsilon"], "div_mode": given["div_mode"]}
        return caller(op("npu_add_rms_norm_quant"), *inputs.values(), **options)

    terms = {name: found.given[name] for name in ("x1", "x2", "gamma")}
    terms |= {"scales": given["scales"], "zero_points": given["zero_points"], "beta": found.beta}
    outputs = [(node, 0), *((reader, 2) for reader in found.sums)]
    joined = (node,) if found.flat else ()
    return call_site(terms, call, outputs, interior=found.steps, joined=joined, rank=found.rank)


def _site(context: PassContext, node: fx.Node, found: Normed, scale: fx.Node) -> Site:
    def call(caller: Caller, inputs: Inputs) -> fx.Node:
        return caller(op("npu_rms_norm_quant"), *inputs.values(), found.given["epsilon"])

    gamma = found.given["gamma"]
    terms = {
        "x": found.x,
        "gamma": gamma,
        "beta": found.beta or _zeros(context, gamma, value_of(gamma).shape, view.dtype(gamma)),
        "scale": scale,
        "offset": _zeros(context, gamma, (1,), torch.int8),
    }
    joined = (node,) if found.flat else ()
    return call_site(terms, call, [(node, None)], interior=found.steps, joined=joined, rank=found.rank)


def _zeros(context: PassContext, like: fx.Node, shape: Any, dtype: torch.dtype | None) -> fx.Node:
    """Return a placeholder bound to zeros, the one that is there already if there is."""
    name = f"npu_zeros_{shape[0]}_{str(dtype).removeprefix('torch.')}"
    assert context.constants is not None  # guaranteed by the guard
    if name in dict(context.constants.added):
        known: fx.Node = next(node for node in context.graph.nodes if node.name == name)
        return known
    fake = value_of(like)
    zeros = torch.zeros(shape, dtype=dtype, device=fake.device)
    made = context.constants.add(context.graph, name, zeros, like=like, sources=())
    if context.analyses is not None:  # the cached analyses lack the new placeholder
        context.analyses.invalidate()
    set_value(made, fake.new_empty(tuple(shape), dtype=dtype), like)
    return made


def expect_add(context: PassContext) -> int | None:
    """Count from the other side: norms of sums whose values one quantisation alone reads, without anything between.

    None where a bias, a view, a write or a stream makes it a matter of the graph's order and shapes.
    """

    def refused(given: Mapping[str, Any], codes: Mapping[str, Any]) -> str:
        fits = static_scales(codes["scales"], codes["zero_points"], given["x1"], divides=codes["div_mode"])
        return first_reason(_other_codes(codes), fits, aligned_rows(context, given["x1"]))

    return count_owed(context, "npu_quantize", refused)


_AFTER = ("eliminate_common_subexpressions", "fuse_npu_add_rms_norm")
FUSE_ADD_RMS_NORM_QUANT = Pass(
    name="fuse_npu_add_rms_norm_quant",
    find=find_add,
    does="Fuse every norm of a sum whose values are quantised by given scales, and only that.",
    guards=Guards(scopes=streams, dtypes=CODES),
    after=_AFTER,
    expect=expect_add,
    examples=static_norms_of_sums,
    owner="npu",
    traits=PassTraits(codes=("npu::npu_quantize",)),
)
FUSE_RMS_NORM_QUANT = Pass(
    name="fuse_npu_rms_norm_quant",
    find=find,
    does="Fuse every norm whose values are quantised by one given scale, and only that.",
    guards=Guards(scopes=streams, dtypes=CODES, constants=True),
    after=_AFTER,
    examples=static_norms,
    owner="npu",
    traits=PassTraits(reads_content=False, codes=("npu::npu_quantize",)),
)
