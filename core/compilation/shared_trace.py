"""One trace for several graphs: for phases that differ in a literal argument of one op (`SharedTrace`), and for values
of a guard that only decide what a model returns (`SharedGuard`)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from core.common.ops.declaration import declared_ops, find_op
from core.common.passes import is_impure
from core.compilation.trace.traced import OutputTree, TracedGraph
from core.errors import UsageError

Literal = bool | int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTrace:
    """The caller's word that the callables of some phases differ in nothing but one argument of one op.

    A trace of one of these phases then serves the others too, where its conditions on sizes hold for their buckets.
    Each phase has its own value in every call of the op.
    """

    #: A canonical op by its qualified name, such as "core::attention".
    op: str
    #: An argument that the op takes by keyword only.
    argument: str
    #: The value of the argument in each phase.
    values: Mapping[str, Literal]

    def check(self, phases: Collection[str]) -> None:
        """Raise `UsageError` for an unknown op, argument or phase."""
        asked = f"sharing a trace between phases that differ in {self.argument!r} of {self.op}"
        op = declared_ops().get(self.op)
        if op is None:
            known = ", ".join(sorted(declared_ops()))
            raise UsageError(asked, found=f"the canonical ops are: {known}", remedy="name one of these")
        names = [argument.name for argument in op.overload._schema.arguments if argument.kwarg_only]
        if self.argument not in names:
            raise UsageError(
                asked, found=f"by keyword only it takes: {', '.join(names) or 'nothing'}", remedy="name one of these"
            )
        unknown = sorted(set(self.values) - set(phases))
        if unknown:
            raise UsageError(
                asked,
                found=f"values for {unknown}, but the buckets name the phases {sorted(phases)}",
                remedy="give values for some of these phases only",
            )

    def calls_have(self, graph: fx.GraphModule, value: Literal) -> bool:
        """Tell whether a graph calls the op, and every call is given this value."""
        found = [node.kwargs.get(self.argument) for node in self._calls(graph)]
        return bool(found) and all(type(each) is type(value) and each == value for each in found)

    def for_phase(self, traced: TracedGraph, phase: str) -> TracedGraph:
        """Return the trace with the phase's value: a graph of its own, over the same tensors and symbols."""
        graph = copy_graph(traced.module, lazy=True)
        for node in self._calls(graph):
            node.update_kwarg(self.argument, self.values[phase])
        return replace(traced, module=graph)

    def _calls(self, graph: fx.GraphModule) -> list[fx.Node]:
        ops = ((node, find_op(node.target)) for node in graph.graph.nodes if node.op == "call_function")
        return [node for node, op in ops if op is not None and op.qualified_name == self.op]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedGuard:
    """The caller's word that some values of a guard decide nothing but what the callables return.

    Given a tuple of these values, a callable returns a mapping from each of them to what it returns with that one. One
    trace then serves them all.
    """

    name: str
    #: Two values at least, without duplicates. Others that the guard has are traced on their own.
    values: tuple[Hashable, ...]

    def check(self, guards: Mapping[str, Mapping[str, Sequence[Hashable]]]) -> None:
        """Raise `UsageError` for values that no phase is captured for. guards: of each phase."""
        known = [value for each in guards.values() for value in each.get(self.name, ())]
        if len(set(self.values)) < max(2, len(self.values)) or not set(self.values) <= set(known):
            raise UsageError(
                f"sharing a trace between {list(self.values)} of guard {self.name!r}",
                found=f"phases are captured for: {', '.join(map(repr, dict.fromkeys(known))) or 'no such guard'}",
                remedy="name two of these values or more, each once",
            )

    def for_value(self, traced: TracedGraph, value: Hashable) -> TracedGraph:
        """Return the trace of one value, from a trace of all: a graph of its own, over the same tensors and symbols.

        It holds nothing that the other values alone asked for.
        """
        by_value = pytree.tree_unflatten(list(traced.output.leaves), traced.output.spec)
        refs, spec = pytree.tree_flatten(by_value[value])
        kept = list(dict.fromkeys(ref.index for ref in refs if ref.index >= 0))
        graph = copy_graph(traced.module, lazy=True)
        output = graph.graph.output_node()
        given: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
        output.args = (tuple(given[index] for index in kept),)
        there = _erase_unused(graph, [node for index, node in enumerate(given) if index not in kept])
        return replace(
            traced,
            module=graph,
            slots=tuple(slot for slot, is_there in zip(traced.slots, there, strict=True) if is_there),
            output=OutputTree(
                tuple(replace(ref, index=kept.index(ref.index)) if ref.index >= 0 else ref for ref in refs), spec
            ),
            outputs=tuple(traced.outputs[index] for index in kept),
        )


def _erase_unused(graph: fx.GraphModule, ends: Sequence[fx.Node]) -> list[bool]:
    """Erase these nodes, and all before them that nothing uses then; return which placeholders are left."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    waiting, erased = list(ends), set()
    while waiting:
        node = waiting.pop()
        if node in erased or node.users or (node.op != "placeholder" and is_impure(node)):
            continue
        waiting.extend(node.all_input_nodes)
        erased.add(node)
        graph.graph.erase_node(node)
    return [node not in erased for node in placeholders]


def copy_graph(module: fx.GraphModule, *, lazy: bool = False) -> fx.GraphModule:
    """Copy a graph with its metadata; the copy is bound to the same tensors.

    lazy: generate the copy's Python when it is first called, as Dynamo's own graphs do. Until then passes change the
    copy many times.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    copy = (_LazyGraphModule if lazy else fx.GraphModule)(module, graph)
    copy.meta = dict(module.meta)
    return copy
