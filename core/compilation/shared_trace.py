"""`SharedTrace`: one trace for several phases, whose callables differ only in a literal argument of one op."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from core.common.ops.declaration import declared_ops, find_op
from core.compilation.trace.traced import TracedGraph
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
