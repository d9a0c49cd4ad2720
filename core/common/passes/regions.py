"""Running graphs and parts of them on real values for verification, each time on tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.common.numerics import Fp64Mode
from core.common.passes.sites import MADE_BY
from core.common.passes.writes import Writes, find_writes


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave. written: by placeholder name, each input whose storage the graph writes; inputs: all of them."""

    outputs: list[Any]
    inputs: Mapping[str, Any]
    written: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Region:
    """One site: what was replaced and what replaced it, as graphs of their own.

    outputs: names of the replaced nodes. sources_before, sources_after: for each placeholder of the two graphs the name
    of the node of the whole graph before the pass whose value it takes.
    """

    site: str
    before: fx.GraphModule
    after: fx.GraphModule
    outputs: tuple[str, ...]
    sources_before: tuple[str, ...]
    sources_after: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """What tells the region from the others."""
        return self.outputs

    def order_before(self, seen: Mapping[str, Any]) -> list[Any]:
        """Return the inputs of the replaced part."""
        return [seen[name] for name in self.sources_before]

    def order_after(self, seen: Mapping[str, Any]) -> list[Any]:
        """Return the inputs of what replaced it."""
        return [seen[name] for name in self.sources_after]


def find_regions(pass_name: str, before: fx.GraphModule, after: fx.GraphModule) -> list[Region]:
    """Return the sites of a pass that can be run apart: those that made their mark and write nothing."""
    olds = {node.name: node for node in before.graph.nodes}
    writes = (find_writes(before), find_writes(after))
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in after.graph.nodes:
        made = node.meta.get(MADE_BY)
        if made is not None and made.pass_name == pass_name and made.replaced and made.replaced[0] in olds:
            # The results of one op with several outputs are checked together.
            several = len(node.args) == 2 and isinstance(node.args[0], fx.Node) and _is_inner(node.args[0], pass_name)
            groups.setdefault(node.args[0] if several else node, []).append(node)
    found = [_region(pass_name, nodes, (before, after), olds, writes) for nodes in groups.values()]
    return [region for region in found if region is not None]


def _is_inner(node: fx.Node, pass_name: str) -> bool:
    made = node.meta.get(MADE_BY)
    return made is not None and made.pass_name == pass_name and not made.replaced


def _region(
    pass_name: str,
    results: list[fx.Node],
    modules: tuple[fx.GraphModule, fx.GraphModule],
    olds: Mapping[str, fx.Node],
    writes: tuple[Writes, Writes],
) -> Region | None:
    names = tuple(node.meta[MADE_BY].replaced[0] for node in results)
    new = _slice(results, lambda node: node in results or _is_inner(node, pass_name))
    new_inputs = _inputs(new)
    sources = {node: _source(node, pass_name, olds) for node in new_inputs}
    if None in sources.values():
        return None
    stops = set(sources.values())
    wanted = [olds[name] for name in names]
    old = _slice(wanted, lambda node: node in wanted or (node.name not in stops and node.op.startswith("call_")))
    old_inputs = _inputs(old)
    if _touches(writes[0], old) or _touches(writes[1], new):
        return None
    return Region(
        site=results[0].meta[MADE_BY].site,
        before=_extract(modules[0], old, old_inputs, wanted),
        after=_extract(modules[1], new, new_inputs, results),
        outputs=names,
        sources_before=tuple(node.name for node in old_inputs),
        sources_after=tuple(str(sources[node]) for node in new_inputs),
    )


def _source(node: fx.Node, pass_name: str, olds: Mapping[str, fx.Node]) -> str | None:
    """Return the name that the node's value has in the graph before the pass."""
    made = node.meta.get(MADE_BY)
    if made is not None and made.pass_name == pass_name and made.replaced:
        return str(made.replaced[0])
    return node.name if node.name in olds else None


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


def _inputs(nodes: set[fx.Node]) -> list[fx.Node]:
    found = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in nodes)
    return sorted(found, key=lambda node: node.name)


def _touches(writes: Writes, nodes: set[fx.Node]) -> bool:
    """Tell whether anything computed or read here is ever written: such a part can't be run apart from the rest."""
    keys = writes.of(*nodes, *_inputs(nodes))
    return any(into & keys for into in writes.written.values())


def _extract(
    module: fx.GraphModule, nodes: set[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return the nodes as a graph of their own."""
    graph = fx.Graph()
    copied = {node: graph.placeholder(node.name) for node in inputs}
    for node in module.graph.nodes:
        if node in nodes:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in results))
    return fx.GraphModule(module, graph)


class Recorder:
    """Notes, during a run of the graph before the pass, what each region reads and gives."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.inputs: dict[tuple[str, ...], dict[str, Any]] = {}
        self.outputs: dict[str, Any] = {}
        self._wanted = {name for region in regions for name in region.outputs}
        self._sources: dict[str, list[tuple[str, ...]]] = {}
        for region in regions:
            for name in {*region.sources_before, *region.sources_after}:
                self._sources.setdefault(name, []).append(region.key)

    def note(self, name: str, value: Any) -> None:
        """Keep a value if a region takes or gives it; a region touches nothing that is written, so no copy is due."""
        for key in self._sources.get(name, ()):
            self.inputs.setdefault(key, {})[name] = value
        if name in self._wanted:
            self.outputs[name] = value


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, recorder: Recorder | None) -> None:
        super().__init__(module)
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self._recorder is not None:
            self._recorder.note(n.name, value)
        return value


class ReferenceMode(Fp64Mode):
    """Compute in fp64 on the CPU, whatever dtype and device the graph names."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` with every device among its arguments replaced."""
        moved = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        if "device" in moved:  # may be a string
            moved["device"] = torch.device("cpu")
        return super().__torch_function__(func, types, tuple(map(_cpu, args)), moved)


def _cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


@dataclass(slots=True)
class _Copies:
    """Copies tensors so that those sharing memory still do."""

    fp64: bool
    bases: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = (value.untyped_storage()._cdata, value.dtype)
        if key not in self.bases:
            size = value.untyped_storage().nbytes() // value.element_size()
            self.bases[key] = self._copy(value.detach().as_strided((size,), (1,), 0))
        return self.bases[key].as_strided(value.shape, value.stride(), value.storage_offset())

    def _copy(self, base: Tensor) -> Tensor:
        if not self.fp64:
            return base.clone()
        return base.to("cpu", torch.float64 if base.is_floating_point() else base.dtype, copy=True)


def run_graph(
    module: fx.GraphModule, values: Sequence[Any], *, fp64: bool = False, recorder: Recorder | None = None
) -> Run:
    """Run a graph on copies of the values; tensors that it only reads are copied for fp64 alone."""
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    nodes = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    writes = find_writes(module)
    written = {name for name in names if writes.writers(nodes[name])}
    # Inputs may share memory without the graph showing it: what is next to a written one is copied with it.
    shared = {_memory(value) for name, value in zip(names, values, strict=True) if name in written}
    copies = _Copies(fp64)
    inputs = {
        name: copies.of(value) if fp64 or name in written or _memory(value) in shared else value
        for name, value in zip(names, values, strict=True)
    }
    with torch.no_grad(), ReferenceMode() if fp64 else nullcontext():
        result = _Interpreter(module, recorder).run(*inputs.values())
    return Run(pytree.tree_leaves(result), inputs, {name: inputs[name] for name in names if name in written})


def _memory(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
