"""Merge linear layers that read one input (query, key and value; gate and up) into one over their joined weights.

One large product instead of several small ones: fewer launches, and fewer passes over the input. The results become
slices of the merged one. Weights keep their identity and become views of the joined weight, so that nothing is held
twice (core/common/passes/packing.py). A kernel may round otherwise at another width: equal by the criterion of
core.common.numerics, not bit by bit.

Quantised linears (`core::quantized_linear`, those that read the same codes, and `core::weight_only_linear`) are merged
likewise; scales and zero points of their weights are joined with these (core/common/passes/linear/mergeable.py).

Merged are linears of the innermost module that has several of the same input, such as an attention or an MLP.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.node_meta import origin_of
from core.common.passes import (
    LIFTS,
    MADE_BY,
    Guards,
    Made,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    PassTraits,
    Refused,
    near_miss,
    set_value,
    site_name,
    value_of,
)
from core.common.passes.linear.joining import Joiner
from core.common.passes.linear.mergeable import Linear, Scales, are_alike, read_linear, spread
from core.common.passes.linear.slices import fakes_of, insert_slices
from core.common.passes.packing import Packing
from core.common.passes.values.recipes import recipe_of, signatures

_Key = tuple[str, int, torch.dtype, torch.dtype, torch.device, str]
_KEY_NAMES = (
    *("module", "writes into the input", "dtype of the weight", "dtype of the result", "device"),
    "scales of the weight",
)


def run(context: PassContext) -> PassResult:
    """Merge every group of linears of one input that can be merged."""
    merger = _Merger(context)
    by_input: dict[tuple[fx.Node, ...], list[Linear]] = defaultdict(list)
    for node in context.graph.nodes:
        linear = read_linear(node)
        if linear is not None:
            by_input[linear.inputs].append(linear)
    for linears in by_input.values():
        if len(linears) > 1:
            merger.merge_all(linears)
    return merger.result()


class _Merger(Joiner):
    """Merges the groups of one graph."""

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        self._recipes: dict[object, Any] = {}
        self._joined: dict[tuple[object, ...], fx.Node] = {}

    def merge_all(self, linears: Sequence[Linear]) -> None:
        """Merge the linears of one input, in as many groups as it takes."""
        fit = []
        for linear in linears:
            reason = self._unfit(linear)
            if reason:
                self.misses.append(near_miss(linear.node, reason))
            else:
                fit.append(linear)
        groups = self._groups(fit)
        for key, group in groups.items():
            if len(group) == 1:
                if len(groups) > 1:
                    self.misses.append(near_miss(group[0].node, _differs(key, groups)))
                continue
            try:
                self._merge(group)
            except Refused as refused:
                self.misses.append(
                    NearMiss(site=site_name(group[0].node), reason=refused.reason, node=refused.node.name)
                )

    def _unfit(self, linear: Linear) -> str:
        """Return why a linear can be merged with no other, or ""."""
        if linear.unfit:
            return linear.unfit
        for operand in linear.constants:
            if self._constants.value(operand) is None:
                return f"{operand.name} is no constant of the graph"
            if self._writes.writers(operand):
                return f"{operand.name} is written by the graph"
        value, weight = value_of(linear.node), value_of(linear.weight)
        if not isinstance(value, FakeTensor) or not isinstance(weight, FakeTensor) or not value.is_contiguous():
            return "its result has no known, contiguous value"
        if weight.ndim != 2 or linear.num_rows == 0:
            return f"its weight has shape {tuple(weight.shape)}"
        alignment = int(self._context.params["alignment_bytes"])
        if linear.num_rows * value.element_size() % alignment:
            return f"its {linear.num_rows} results would put those after it off {alignment} bytes"
        memory = self._writes.of(linear.node)
        if memory & self._returned:
            return "its result is returned"
        return "its result is written later" if self._writes.writers(linear.node) else ""

    def _groups(self, linears: Sequence[Linear]) -> Mapping[_Key, list[Linear]]:
        """Divide linears of one input: by module, dtype, device, and by what was written into the input before."""
        groups: dict[_Key, list[Linear]] = defaultdict(list)
        known: dict[_Key, set[fx.Node]] = defaultdict(set)
        for linear in linears:
            weight = value_of(linear.weight)
            before = sum(self._order[w] < self._order[linear.node] for w in self._writes.writers(*linear.inputs))
            module = _common_module(linear, linears)
            key = (module, before, weight.dtype, value_of(linear.node).dtype, weight.device, linear.form)
            twice = next((each for each in linear.constants if each in known[key]), None)
            if twice is not None:  # joined, it would lie in two places, of which a load in place reaches one
                self.misses.append(near_miss(linear.node, f"{twice.name} is used twice on one input"))
                continue
            known[key].update(linear.constants)
            groups[key].append(linear)
        return groups

    def _merge(self, group: Sequence[Linear]) -> None:
        """Merge one group; raise `Refused` where it can't be, with nothing changed."""
        first = group[0]
        weights, biases, scales, zeros = self._packings(group)
        for packing in filter(None, (weights, biases, scales, zeros)):
            reason = self._owners.refusal(packing)
            if reason:
                names = ", ".join(linear.weight.name for linear in group)
                raise Refused(first.node, f"the weights {names} can't be joined: {reason}")
        sizes = [linear.num_rows for linear in group]
        whole, parts = self._fakes(value_of(first.node), tuple(sizes))
        changed = {linear.node: part for linear, part in zip(group, parts, strict=True)}
        values = self._relayout.consequences(changed)
        names = "_".join(linear.path.rpartition(".")[2] for linear in group)
        prefix = re.sub(r"\W+", "_", f"merged_{_common_module(group[0], group)}_{names}")
        weight = self._join(f"{prefix}_weight", [linear.weight for linear in group], weights)
        bias = None
        if biases is not None:
            bias = self._join(f"{prefix}_bias", [linear.bias for linear in group], biases)
        scale = self._join_scales(f"{prefix}_weight_scale", [each.scales for each in group if each.scales], scales)
        points = None
        if zeros is not None:
            points = self._join(
                f"{prefix}_weight_zero_point", [each.scales.zeros for each in group if each.scales], zeros
            )
        self._rewrite(group, (weight, bias, scale, points), (whole, parts), values)

    def _fakes(self, like: FakeTensor, sizes: tuple[int, ...]) -> tuple[FakeTensor, tuple[FakeTensor, ...]]:
        """Return the fake values of the merged result and of its slices; equal layers reuse them."""
        key = (signatures((like,)), sizes)
        known = self._recipes.get(key)
        if known is None:
            whole, parts = fakes_of(like, sizes)
            recipes = recipe_of(whole, ()), recipe_of(parts, (whole,))
            if None not in recipes:
                self._recipes[key] = recipes
            return whole, parts
        made: Any = known[0].make(())
        return made, known[1].make((made,))

    def _packings(self, group: Sequence[Linear]) -> tuple[Packing, Packing | None, Packing | None, Packing | None]:
        """Return the tensors to lay end to end: weights, biases if there are any, scales that can be joined, zeros."""
        sizes = tuple(linear.num_rows for linear in group)
        weights = tuple(self._constants.value(linear.weight) for linear in group)
        # A linear without a bias gets one of zeros where the others have one.
        biases = tuple(self._constants.value(linear.bias) for linear in group)
        has_bias = any(bias is not None for bias in biases)
        scales = [linear.scales for linear in group if linear.scales is not None]
        rows = tuple(each.num_rows for each in scales)
        found = tuple(self._constants.value(each.weight) for each in scales)
        points = tuple(self._constants.value(each.zeros) for each in scales)
        return (
            Packing(weights, sizes),
            Packing(biases, sizes) if has_bias else None,
            Packing(found, rows) if scales and are_alike(scales) else None,
            Packing(points, rows) if scales and scales[0].zeros is not None else None,
        )

    def _join(self, name: str, nodes: Sequence[fx.Node | None], packing: Packing) -> fx.Node:
        key = (*nodes, packing.sizes)
        if key not in self._joined:  # layers may share their weights
            like = next(node for node in nodes if node is not None)
            self._joined[key] = self._constants.add(self._context.graph, name, packing.pack(), like, packing=packing)
        return self._joined[key]

    def _join_scales(self, name: str, scales: Sequence[Scales], packing: Packing | None) -> fx.Node | None:
        """Return the scales of the joined weight, laid end to end if there is a packing, else spread; None for none."""
        nodes = [each.weight for each in scales]
        key = (*nodes, tuple(each.num_channels for each in scales))
        if nodes and key not in self._joined:
            values = [v for v in map(self._constants.value, nodes) if v is not None]
            joined = spread(scales, values) if packing is None else packing.pack()
            self._joined[key] = self._constants.add(
                self._context.graph, name, joined, nodes[0], packing=packing, sources=values
            )
        return self._joined[key] if nodes else None

    def _rewrite(
        self,
        group: Sequence[Linear],
        operands: tuple[fx.Node, fx.Node | None, fx.Node | None, fx.Node | None],
        fakes: tuple[Any, tuple[Any, ...]],
        values: Mapping[fx.Node, Any],
    ) -> None:
        """Put the merged linear before the first of the group, and slices of it in the place of each."""
        graph, first = self._context.graph, group[0].node
        path = _common_module(group[0], group)
        made = Made(pass_name=self._context.name, owner=self._context.owner, site=path)
        meta = origin_of(first)
        stack = list(meta.pop("nn_module_stack", {}).items())
        if len(stack) > 1:
            meta["nn_module_stack"] = dict(stack[:-1])
        for node, value in values.items():
            set_value(node, value)
        sizes = [linear.num_rows for linear in group]
        with graph.inserting_before(first):
            merged = group[0].call(graph, *operands)
            parts, slices = insert_slices(graph, merged, sizes)
        for node, value in zip((merged, parts, *slices), (fakes[0], fakes[1], *fakes[1]), strict=True):
            node.meta |= meta | {MADE_BY: made}
            set_value(node, value, first)
        for linear, part in zip(group, slices, strict=True):
            part.meta[MADE_BY] = Made(
                pass_name=made.pass_name, owner=made.owner, site=path, replaced=(linear.node.name,)
            )
            linear.node.replace_all_uses_with(part)
            graph.erase_node(linear.node)
        self.sites.append(path or site_name(merged))


def _common_module(linear: Linear, linears: Sequence[Linear]) -> str:
    """Return the path of the innermost module that holds this linear and another one; "" for the whole model."""
    path = linear.path
    while path and sum(f"{other.path}.".startswith(f"{path}.") for other in linears) < 2:
        path = path.rpartition(".")[0]
    return path


def _differs(key: _Key, groups: Mapping[_Key, Sequence[Linear]]) -> str:
    """Say how a linear that stays alone differs from another one that reads the same input."""
    other, linears = next(item for item in groups.items() if item[0] != key)
    found = [name for name, ours, theirs in zip(_KEY_NAMES, key, other, strict=True) if ours != theirs]
    return f"{linears[0].node.name} reads {linears[0].x.name} too, and differs in: {', '.join(found)}"


MERGE_LINEARS = Pass(
    name="merge_linears",
    does="Merge every group of linears of one input that can be merged.",
    run=run,
    after=("eliminate_common_subexpressions", *LIFTS),
    guards=Guards(constants=True),
    # Rows of a merged result begin at multiples of this, and so do the slices: kernels read in units of that size.
    params=MappingProxyType({"alignment_bytes": 16}),
    traits=PassTraits(reads_content=False),
)
