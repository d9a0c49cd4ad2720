"""The sites of a pass as small graphs of their own: what was replaced, and what replaced it.

A site that writes (a cache, by an attention op) is a region too, where nothing else writes the same memory between its
first and its last node; the writes that the pass took out belong to what was replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.passes.sites import MADE_BY
from core.common.passes.writes import find_writes
from core.verify.execution import Copies, Watcher


@dataclass(frozen=True, slots=True)
class Region:
    """One site: the nodes that a pass replaced, and those that it put in their place."""

    #: Where it is in the model.
    site: str
    #: The first result of what replaced it.
    node: str
    #: The replaced nodes as a graph of their own.
    before: fx.GraphModule
    #: What replaced them, likewise.
    after: fx.GraphModule
    #: The value of each placeholder of `before`: a node of the whole graph before the pass.
    sources_before: tuple[str, ...]
    #: The value of each placeholder of `after`: such a node, or a placeholder that the pass added.
    sources_after: tuple[str, ...]
    #: The first replaced node.
    start: str
    #: Sources in memory that the whole graph writes: the region reads their content at its start.
    changing: frozenset[str]

    @property
    def sources(self) -> frozenset[str]:
        """All values that either side takes."""
        return frozenset((*self.sources_before, *self.sources_after))


def find_regions(pass_name: str, before: fx.GraphModule, after: fx.GraphModule) -> list[Region]:
    """Return the sites of a pass that can be run apart: those that made their mark, in graph order."""
    search = _Search(pass_name, before, after)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in after.graph.nodes:
        made = node.meta.get(MADE_BY)
        if search.made(node) and made.replaced and made.replaced[0] in search.olds:
            # The results of one op with several outputs are checked together.
            groups.setdefault(search.call_of(node), []).append(node)
    found = [search.region(nodes) for nodes in groups.values()]
    return [region for region in found if region is not None]


class _Search:
    """State that the regions of one pass share."""

    def __init__(self, pass_name: str, before: fx.GraphModule, after: fx.GraphModule) -> None:
        self.pass_name, self.before, self.after = pass_name, before, after
        self.olds = {node.name: node for node in before.graph.nodes}
        self.kept = {node.name for node in after.graph.nodes}
        self.old_writes, self.new_writes = find_writes(before), find_writes(after)
        self.order = {node: position for graph in (before, after) for position, node in enumerate(graph.graph.nodes)}

    def made(self, node: fx.Node) -> bool:
        made = node.meta.get(MADE_BY)
        return made is not None and made.pass_name == self.pass_name

    def is_inner(self, node: fx.Node) -> bool:
        """Tell whether a node is new and replaces none; passes need not mark such nodes."""
        replaces = self.made(node) and node.meta[MADE_BY].replaced
        return node.op.startswith("call_") and node.name not in self.olds and not replaces

    def call_of(self, node: fx.Node) -> fx.Node:
        """Return the new call behind a result and its views; the result itself if there is none."""
        source = node.args[0] if node.target in (operator.getitem, "transpose") else None
        return self.call_of(source) if isinstance(source, fx.Node) and self.is_inner(source) else node

    def region(self, results: list[fx.Node]) -> Region | None:
        new = self._new_part(results)
        new_inputs = self._inputs(new)
        sources = {node: self._source(node) for node in new_inputs}
        if None in sources.values():
            return None
        wanted = [self.olds[node.meta[MADE_BY].replaced[0]] for node in results]
        taken = [self.olds[str(name)] for name in sources.values() if name in self.olds]
        old = self._old_part(wanted, set(taken))
        old_inputs = self._inputs(old)
        changing = self._changing(old, {*old_inputs, *taken})
        if changing is None:
            return None
        return Region(
            site=results[0].meta[MADE_BY].site,
            node=results[0].name,
            before=self._extract(self.before, old, old_inputs, wanted),
            after=self._extract(self.after, new, new_inputs, results),
            sources_before=tuple(node.name for node in old_inputs),
            sources_after=tuple(str(sources[node]) for node in new_inputs),
            start=min(old, key=self.order.__getitem__).name,
            changing=changing,
        )

    def _new_part(self, results: Sequence[fx.Node]) -> set[fx.Node]:
        def inside(node: fx.Node) -> bool:
            return node in results or self.is_inner(node)

        found = _slice(results, inside)
        keys = self.new_writes.of(*found, *self._inputs(found))
        writers = [node for node, into in self.new_writes.written.items() if into & keys and self.is_inner(node)]
        return found | _slice(writers, inside)

    def _old_part(self, wanted: Sequence[fx.Node], taken: set[fx.Node]) -> set[fx.Node]:
        def inside(node: fx.Node) -> bool:
            return node in wanted or (node not in taken and node.op.startswith("call_"))

        found = _slice(wanted, inside)
        while True:
            keys = self.old_writes.of(*found, *self._inputs(found), *taken)
            end = max(self.order[node] for node in found)
            lost = [
                node
                for node, into in self.old_writes.written.items()
                if into & keys
                and node not in found
                and node.name not in self.kept
                and (self.order[node] < end or self._of_one_site(node, found))
            ]
            if not lost:
                return found
            found |= _slice([source for node in lost for source in node.all_input_nodes], inside).union(lost)

    def _of_one_site(self, node: fx.Node, found: set[fx.Node]) -> bool:
        """Tell whether a node that the pass took out was computed from these, through nodes that it took out too."""

        def taken_out(other: fx.Node) -> bool:
            return other.op.startswith("call_") and other.name not in self.kept

        return not found.isdisjoint(_slice([node], taken_out))

    def _changing(self, old: set[fx.Node], sources: set[fx.Node]) -> frozenset[str] | None:
        """Return the sources in memory that is written, or None where the region can't be run apart from the rest."""
        start = min(self.order[node] for node in old)
        written = self.old_writes.written
        own = frozenset().union(*(written.get(node, frozenset()) for node in old))
        for node, into in written.items():
            if node not in old and self._disturbs(node, into, old, sources, own):
                return None
        if any(self.old_writes.of(node) & own and self.order[node] >= start for node in sources):
            return None  # it would be copied too late, after the region has written it
        every: frozenset[object] = frozenset().union(*written.values())
        return frozenset(node.name for node in sources if self.old_writes.of(node) & every)

    def _disturbs(
        self,
        writer: fx.Node,
        into: frozenset[object],
        old: set[fx.Node],
        sources: set[fx.Node],
        own: frozenset[object],
    ) -> bool:
        """Tell whether a write from outside changes what the region reads, or is changed by it, while it runs."""
        start, end = (limit(self.order[node] for node in old) for limit in (min, max))
        if not (into & self.old_writes.of(*old, *sources) and start <= self.order[writer] <= end):
            return False
        readers = [node for node in old if self.old_writes.of(node, *node.all_input_nodes) & into]
        late = [node for node in sources if self.old_writes.of(node) & into and self.order[node] >= start]
        return bool(into & own or late or any(self.order[node] > self.order[writer] for node in readers))

    def _source(self, node: fx.Node) -> str | None:
        """Return the name that the node's value has in the graph before the pass."""
        if self.made(node) and node.meta[MADE_BY].replaced:
            return str(node.meta[MADE_BY].replaced[0])
        return node.name if node.name in self.olds or node.op == "placeholder" else None

    def _inputs(self, nodes: set[fx.Node]) -> list[fx.Node]:
        found = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in nodes)
        return sorted(found, key=lambda node: node.name)

    def _extract(
        self, module: fx.GraphModule, nodes: set[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> fx.GraphModule:
        """Return the nodes as a graph of their own."""
        graph = fx.Graph()
        copied: dict[fx.Node, Any] = {}
        for node in inputs:
            copied[node] = graph.placeholder(node.name)
            copied[node].meta = dict(node.meta)  # its fake value shows which memory it shares
        for node in sorted(nodes, key=self.order.__getitem__):
            copied[node] = graph.node_copy(node, copied.__getitem__)
        graph.output(tuple(copied[node] for node in results))
        return fx.GraphModule(module, graph)


def _slice(results: Sequence[fx.Node], inside: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the nodes from which the results are computed, back to where `inside` ends."""
    found: set[fx.Node] = set()
    stack = [node for node in results if inside(node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [source for source in node.all_input_nodes if inside(source)]
    return found


class Feed(Watcher):
    """Watches a run of the graph before the pass, and hands each region its inputs as soon as all are there.

    Nothing is kept after that, so that the values of one region at a time are in memory.
    """

    def __init__(
        self, regions: Sequence[Region], added: Mapping[str, Any], judge: Callable[[Region, Mapping[str, Any]], None]
    ) -> None:
        self._judge = judge
        self._pending = {region: {n: added[n] for n in region.sources if n in added} for region in regions}
        self._started = {region: Copies() for region in regions if not region.changing}
        self._takers: dict[str, list[Region]] = {}
        self._starts: dict[str, list[Region]] = {}
        for region in regions:
            self._starts.setdefault(region.start, []).append(region)
            for name in region.sources:
                self._takers.setdefault(name, []).append(region)

    def before(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        """Copy the inputs, in memory that is written, of the region that starts here."""
        for region in self._starts.get(node.name, ()):
            if region not in self._started and region in self._pending:
                copies, seen = Copies(), self._pending[region]
                self._started[region] = copies
                seen.update({name: copies.of(seen[name]) for name in region.changing if name in seen})
                self._finish(region)

    def after(self, node: fx.Node, value: Any) -> None:
        """Keep the value for the regions that take it."""
        for region in self._takers.get(node.name, ()):
            if region in self._pending:
                copies = self._started.get(region) if node.name in region.changing else None
                self._pending[region][node.name] = value if copies is None else copies.of(value)
                self._finish(region)

    def _finish(self, region: Region) -> None:
        if region in self._started and len(self._pending[region]) == len(region.sources):
            self._judge(region, self._pending.pop(region))
