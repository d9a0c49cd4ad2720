"""Merge what adapters add to the slices of a merged linear: one `core::add_lora` of its whole result.

`merge_linears` joins query, key and value, or gate and up. An adapter has an A and a B for each of them, which are laid
end to end as the weights were (core/common/passes/packing.py): one call in place of three or two, whose result the
gate of an MLP reads whole. An adapter that is loaded later is written into the same memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.node_meta import origin_of
from core.common.ops.linear import ADD_LORA
from core.common.passes import (
    MADE_BY,
    Guards,
    Made,
    Pass,
    PassContext,
    PassResult,
    PassTraits,
    Refused,
    calls,
    find_op,
    near_miss,
    set_value,
    site_name,
    value_of,
    view,
)
from core.common.passes.linear.joining import Joiner
from core.common.passes.linear.slices import fakes_of, insert_slices
from core.common.passes.packing import Packing

_SHARED = ("x", "slots", "rank")
"""Arguments that the calls on all slices of a result share."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The calls on the slices of one result, in the order of the slices."""

    split: fx.Node
    parts: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    given: tuple[Mapping[str, Any], ...]

    @property
    def whole(self) -> fx.Node:
        """The merged result."""
        node = self.split.args[0]
        assert isinstance(node, fx.Node)
        return node

    @property
    def sizes(self) -> list[int]:
        """The columns of each slice."""
        return [int(value_of(node).shape[-1]) for node in self.nodes]


def run(context: PassContext) -> PassResult:
    """Merge the calls on the slices of every result that can be merged."""
    merger = _Merger(context)
    for node in list(context.graph.nodes):
        if view.kind(node) == "split":
            merger.merge(node)
    return merger.result()


class _Merger(Joiner):
    def merge(self, split: fx.Node) -> None:
        """Merge the calls on the slices of one split, or note why they can't be; nothing where there are none."""
        parts = [part for _, part in sorted(calls.results(split).items())]
        found = [_call_on(part) for part in parts]
        if not any(found):
            return
        if not all(found) or not len(parts) == len(split.users) == len(value_of(split)):
            self.misses.append(near_miss(split, "one of its slices has readers beside what adapters add"))
            return
        nodes = tuple(node for node in found if node is not None)
        group = _Group(split, tuple(parts), nodes, tuple(calls.arguments(node, ADD_LORA) for node in nodes))
        reason = self._refusal(group)
        if reason:
            self.misses.append(near_miss(split, reason))
            return
        try:
            self._rewrite(group)
        except Refused as refused:
            self.misses.append(near_miss(refused.node, refused.reason))

    def _refusal(self, group: _Group) -> str:
        """Return why the calls can't be one, or ""."""
        first = group.given[0]
        if sum(group.sizes) != value_of(group.whole).shape[-1]:
            return "it does not split columns"
        for node, given in zip(group.nodes, group.given, strict=True):
            other = next(
                (name for name in _SHARED if given[name] is not first[name] and given[name] != first[name]), ""
            )
            if other or list(given["sizes"]) != [value_of(node).shape[-1]]:
                return f"{node.name} has another {other or 'number of layers'} than {group.nodes[0].name}"
            for operand in (given["a"], given["b"]):
                if self._constants.value(operand) is None or self._writes.writers(operand):
                    return f"{operand} is no constant of the graph"
            if self._before(group, node) != self._before(group, group.nodes[0]):
                return f"an operand is written between {group.nodes[0].name} and {node.name}"
            if self._writes.of(node) & self._returned or self._writes.writers(node):
                return f"the result of {node.name} is returned, or written later"
            if not isinstance(value_of(node), FakeTensor) or not value_of(node).is_contiguous():
                return f"the result of {node.name} has no known, contiguous value"
        return next(filter(None, map(self._owners.refusal, self._packings(group))), "")

    def _before(self, group: _Group, node: fx.Node) -> int:
        """Return how many writes into what the calls read come before one of them."""
        read = (group.whole, group.given[0]["x"], group.given[0]["slots"])
        return sum(self._order[writer] < self._order[node] for writer in self._writes.writers(*read))

    def _packings(self, group: _Group) -> list[Packing]:
        """Return the A and the B to lay end to end."""
        found = []
        for name in ("a", "b"):
            tensors = [self._constants.value(given[name]) for given in group.given]
            found.append(Packing(tuple(tensors), tuple(len(each) for each in tensors if each is not None)))
        return found

    def _rewrite(self, group: _Group) -> None:
        """Put one call on the whole result before the first of the group, and its slices in the place of each."""
        graph, sizes = self._context.graph, group.sizes
        first = min(group.nodes, key=self._order.__getitem__)
        whole, parts = fakes_of(value_of(first), sizes)
        values = self._relayout.consequences(dict(zip(group.nodes, parts, strict=True)))
        site = site_name(group.split)
        operands = []
        for name, packing in zip(("a", "b"), self._packings(group), strict=True):
            title = re.sub(r"\W+", "_", f"merged_{site}_lora_{name}")
            like = group.given[0][name]
            operands.append(self._constants.add(graph, title, packing.pack(), like, packing=packing))
        for node, value in values.items():
            set_value(node, value)
        given = group.given[0]
        with graph.inserting_before(first):
            args = (group.whole, given["x"], *operands, given["slots"])
            merged = graph.call_function(ADD_LORA.overload, args, {"rank": given["rank"], "sizes": sizes})
            split, slices = insert_slices(graph, merged, sizes)
        made = Made(pass_name=self._context.name, owner=self._context.owner, site=site)
        meta = origin_of(group.split)
        for node, value in zip((merged, split, *slices), (whole, parts, *parts), strict=True):
            node.meta |= meta | {MADE_BY: made}
            set_value(node, value, first)
        for node, part in zip(group.nodes, slices, strict=True):
            part.meta[MADE_BY] = Made(pass_name=made.pass_name, owner=made.owner, site=site, replaced=(node.name,))
            node.replace_all_uses_with(part)
            graph.erase_node(node)
        for node in (*group.parts, group.split):
            graph.erase_node(node)
        self.sites.append(site)


def _call_on(part: fx.Node) -> fx.Node | None:
    """Return the call of `core::add_lora` that alone reads a slice, as its base."""
    node = view.only_user(part)
    if node is None or find_op(node.target) is not ADD_LORA:
        return None
    given = calls.arguments(node, ADD_LORA)
    return node if given["base"] is part and given["x"] is not part else None


MERGE_LORA = Pass(
    name="merge_lora",
    does="Merge what adapters add to the slices of every merged linear.",
    run=run,
    after=("merge_linears",),
    guards=Guards(constants=True),
    traits=PassTraits(reads_content=False),
)
