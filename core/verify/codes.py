"""Judging the int8 codes of a quantisation, which need not be equal: rounding the values before moves some by one.

A pass names the ops whose int8 results are codes (`PassTraits.codes`). If the pass replaces such an op, the codes are
judged like rounded values: their distance in steps from the codes of the fp64 run is compared with the distance of the
graph before the pass. All other integers must be equal: a mask, an index or an expert that differs is another decision.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from core.common.passes import view

FACTOR = 2
"""The distance in steps allowed for the graph after, as a multiple of that of the graph before, as in T1. Measured:
kernels that quantise norms and gates without rounding them reached 0.48 of the bound, in bf16 and fp16."""
FEW, PLACES = 4, 64
"""The steps allowed if the graph before has no difference: one per this many places, at most FEW."""
_ABSURD = 0.25
_LAYOUTS = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute"})
_SAME_VALUES = _LAYOUTS | {"getitem", "contiguous", "clone"}


def quantisations(graph: fx.Graph, ops: Collection[str]) -> frozenset[str]:
    """Return the names of the nodes that call one of these ops, named as "acme::quantize"."""
    return frozenset(node.name for node in graph.nodes if node.op == "call_function" and _name(node.target) in ops)


def codes_among(graph: fx.Graph, made: Collection[str]) -> frozenset[str]:
    """Return the names of the nodes whose values are codes: the nodes that make codes, and reshaped or indexed ones."""
    found: set[str] = set()
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        moved = isinstance(first, fx.Node) and first.name in found and view.kind(node) in _SAME_VALUES
        # Indexing a tensor may also choose by values; an int takes a result of several, or a part of one.
        if node.name in made or (moved and (view.kind(node) != "getitem" or isinstance(node.args[1], int))):
            found.add(node.name)
    return frozenset(found)


def outputs_among(module: fx.GraphModule, codes: Collection[str]) -> frozenset[int]:
    """Return which of a graph's outputs are values of these nodes."""
    (output,) = module.graph.find_nodes(op="output")
    leaves = pytree.tree_leaves(output.args[0])
    return frozenset(index for index, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and leaf.name in codes)


def are_codes(value: Any) -> bool:
    """Tell whether a value of such a node holds codes, and not their scale or zero point."""
    return isinstance(value, Tensor) and value.dtype == torch.int8


def judge_codes(result: Tensor, old: Tensor, exact: Tensor) -> tuple[str, float]:
    """Return why codes fail ("" if they do not) and their error over the bound.

    No code may be further from the exact one than one step, or than the worst of the old codes. The steps of all codes
    together may be twice those of the old codes, and a few more. Old codes that are off by a quarter of the exact ones
    are no yardstick.

    exact: the codes of the fp64 run.
    """
    given, wanted, right = (codes.detach().cpu().long() for codes in (result, old, exact))
    ours, theirs = (given - right).abs(), (wanted - right).abs()
    count = ours.numel()
    most = max(1, int(theirs.max()))
    if int(ours.max()) > most:
        return f"{int((ours > most).sum())} of {count} codes are off by up to {int(ours.max())} steps", float("inf")
    if float(theirs.double().pow(2).mean()) > _ABSURD**2 * float(right.double().pow(2).mean()):
        return f"{int((given != wanted).sum())} of {count} codes differ, and the old ones are no yardstick", float(
            "inf"
        )
    steps, bound = int(ours.sum()), FACTOR * int(theirs.sum()) + min(FEW, count // PLACES)
    ratio = steps / bound if bound else float("inf") if steps else 0.0
    return f"{steps} of {count} codes are a step off, over {bound}" if ratio > 1 else "", ratio


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target._schema.name)
    return str(target._qualified_op_name) if isinstance(target, OpOverloadPacket) else ""
