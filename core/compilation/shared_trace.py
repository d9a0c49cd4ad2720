"""One trace for several graphs: for phases that differ in a literal argument of one op (`SharedTrace`), and for values
of a guard that only decide what a model returns (`SharedGuard`)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from core.common.ops.declaration import declared_ops, find_op
from core.common.passes import is_impure
from core.compilation.trace.traced import OutputRef, OutputTree, TracedGraph
from core.errors import TraceError, UsageError

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

    Given a tuple of these values, a callable returns a dict from each of them to what it returns with that one. One
    trace then serves them all, in the buckets in which its conditions on sizes hold, those of each value. Values of
    which one draws random numbers or writes into tensors on its way to its outputs are traced apart all the same.
    """

    name: str
    #: Two values at least, each once. Others that the guard has are traced on their own.
    values: tuple[Hashable, ...]

    def check(self, guards: Mapping[str, Mapping[str, Sequence[Hashable]]]) -> None:
        """Raise `UsageError` for values that no phase is captured for. guards: of each phase."""
        known = [value for each in guards.values() for value in each.get(self.name, ())]
        each_once = isinstance(self.values, tuple) and len(set(self.values)) == len(self.values) > 1
        if not each_once or not set(self.values) <= set(known):
            raise UsageError(
                f"sharing a trace between {self.values!r} of guard {self.name!r}",
                found=f"phases are captured for: {', '.join(map(repr, dict.fromkeys(known))) or 'no such guard'}",
                remedy="give a tuple of two of these values or more, each once",
            )

    def why_not(self, traced: TracedGraph) -> str | None:
        """Return why the values can't share this trace of them all; None where they can.

        Raises `TraceError` where its output is none of theirs.
        """
        spec = traced.output.spec
        parts = [spec.child(index) for index in range(spec.num_children)]
        if spec != pytree.TreeSpec(dict, list(self.values), parts):
            raise TraceError(
                f"tracing a model with {self.name}={self.values!r}, whose values share a trace",
                found=f"it returns {spec}",
                remedy="return a dict from each of these values to what the model returns with it, in their order",
            )
        given = _outputs_of(traced.module)
        needed = [_before(given[ref.index] for ref in self._leaves(traced, v) if ref.index >= 0) for v in self.values]
        shared = needed[0].intersection(*needed[1:])
        alone = needed[0].union(*needed[1:]) - shared
        calls = [node for node in traced.module.graph.nodes if node.op not in ("placeholder", "output")]
        first = next((index for index, node in enumerate(calls) if node in alone), len(calls))
        impure = next((node for node in calls[first:] if is_impure(node)), None)
        return None if impure is None else f"{impure} is more than a value, and may belong to one of them alone"

    def for_value(self, traced: TracedGraph, value: Hashable) -> TracedGraph:
        """Return the trace of one value, from a trace of all: a graph of its own, over the same tensors and symbols.

        What the other values alone compute is left out.
        """
        refs = self._leaves(traced, value)
        kept = list(dict.fromkeys(ref.index for ref in refs if ref.index >= 0))
        graph = copy_graph(traced.module, lazy=True)
        given = _outputs_of(graph)
        graph.graph.output_node().args = (tuple(given[index] for index in kept),)
        there = _erase_unused(graph, [node for index, node in enumerate(given) if index not in kept])
        leaves = tuple(replace(ref, index=kept.index(ref.index)) if ref.index >= 0 else ref for ref in refs)
        return replace(
            traced,
            module=graph,
            slots=tuple(slot for slot, is_there in zip(traced.slots, there, strict=True) if is_there),
            output=OutputTree(leaves, traced.output.spec.child(self.values.index(value))),
            outputs=tuple(traced.outputs[index] for index in kept),
        )

    def _leaves(self, traced: TracedGraph, value: Hashable) -> Sequence[OutputRef]:
        number, spec = self.values.index(value), traced.output.spec
        begin = sum(spec.child(index).num_leaves for index in range(number))
        return traced.output.leaves[begin : begin + spec.child(number).num_leaves]


def _outputs_of(graph: fx.GraphModule) -> Sequence[fx.Node]:
    (outputs,) = graph.graph.output_node().args
    return outputs  # type: ignore[return-value]


def _before(ends: Iterable[fx.Node]) -> set[fx.Node]:
    """Return these nodes and all that they are computed of."""
    waiting, found = list(ends), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


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
