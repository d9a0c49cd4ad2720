"""Compares a lowered graph with the same graph run op by op, and finds the smallest part that the lowering gets
wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.common.lowering import Lowering, LoweringRequest
from core.common.node_meta import value_of
from core.common.passes.sites import site_name
from core.compilation.rewrite.snapshot import Snapshot
from core.verify.bisect.ops import OpTargets, as_ops
from core.verify.bisect.report import Fault, Progress, Step
from core.verify.compare import Comparison, strides_problem
from core.verify.execution import (
    Copies,
    Place,
    Watcher,
    changing_nodes,
    error_line,
    node_text,
    own_inputs,
    run_graph,
    written_inputs,
)


def judge_lowering(
    phase: str,
    module: fx.GraphModule,
    name: str,
    lowering: Lowering,
    inputs: Sequence[Sequence[Any]],
    *,
    ops: OpTargets,
    owner: str,
    progress: Progress,
) -> tuple[Step, Fault | None, list[tuple[Any, ...]]]:
    """Judge a lowering of a finished graph; on a fault, narrow it down.

    ops: the canonical op that each node of the graph came from. Also returns the lowered graph's outputs for each set
    of inputs, up to the first that fails. Narrowing lowers parts of the graph again, about `2 * log2(nodes)` times.
    """
    judge = _Judge(lowering, ops)
    total = Comparison()
    given: list[tuple[Any, ...]] = []
    fault: Fault | None = None
    for values in inputs:
        outputs = judge.part(module, values, total)
        given += [outputs] if outputs else []
        if total.reason:
            if judge.stopped is not None:  # the graph itself is at fault, not a part of its lowering
                nodes, found = [judge.stopped], total
            else:
                progress(f"{phase}: narrowing down lowering {name}")
                nodes, found = _narrow(judge, module, values, total)
            fault = Fault(
                phase=phase,
                kind="lowering",
                name=name,
                owner=owner,
                site=_site(nodes),
                nodes=tuple(node.name for node in nodes),
                reason=found.reason,
                ratio=found.ratio,
            )
            break
    step = Step(
        phase=phase,
        kind="lowering",
        name=name,
        owner=owner,
        outcome=total.outcome,
        num_values=total.num_values,
        worst_ratio=total.worst,
        note=total.unjudged,
    )
    return step, fault, given


def _site(nodes: Sequence[fx.Node]) -> str:
    """Return the module path of a part of the graph: of its first node, and of its last if that is another."""
    first, last = site_name(nodes[0]), site_name(nodes[-1])
    return first if first == last else f"{first} to {last}"


class _Judge:
    """Lowers graphs and compares them with a run op by op."""

    def __init__(self, lowering: Lowering, ops: OpTargets) -> None:
        self._lowering, self.ops = lowering, ops
        #: The node at which the graph stopped when it was run op by op, before any lowering.
        self.stopped: fx.Node | None = None

    def part(self, module: fx.GraphModule, values: Sequence[Any], into: Comparison) -> tuple[Any, ...]:
        """Judge the lowering of one graph on one set of inputs into a comparison; return what the lowering gave."""
        # Put ops back: only an op declares its writes and runs in fp64, implementations do neither.
        named = as_ops(module, self.ops)
        written = written_inputs(named)
        place, layouts = Place(), _Layouts()
        try:
            old = run_graph(module, values, watchers=[place, layouts], written=written)
        except Exception as error:
            self.stopped = layouts.wrong or place.node
            cause = f"; {layouts.problem}" if layouts.problem else ""
            into.fail("the graph run op by op", f"it stops at {place}: {error_line(error)}{cause}")
            return ()
        own = own_inputs(module, values, written=written)
        try:
            # A lowering owns its graph and may change it.
            graph = Snapshot(module).module()
            lowered = self._lowering(LoweringRequest(graph=graph, example_inputs=tuple(own.values())))
            with torch.no_grad():
                outputs = list(lowered(*own.values()))
        except Exception as error:
            into.fail("the lowered graph", f"it raised {error_line(error)}")
            return ()
        if len(outputs) != len(old.outputs):
            into.fail("the outputs", f"{len(outputs)} instead of {len(old.outputs)}")
            return ()
        names = [f"value {node}" for node in pytree.tree_leaves(module.graph.output_node().args[0])]
        names += [f"written {name}" for name in old.written]
        news = [*outputs, *(own[name] for name in old.written)]
        into.add(names, news, old.results, lambda: run_graph(named, values, fp64=True, pinned=old.decided).results)
        return tuple(outputs)


def _narrow(
    judge: _Judge, module: fx.GraphModule, values: Sequence[Any], whole: Comparison
) -> tuple[list[fx.Node], Comparison]:
    """Return the nodes of the smallest part found that fails alone, and its comparison.

    First the shortest failing prefix, then its shortest failing end; a part is cut only where tensors and sizes cross.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    cuts = _cuts(nodes)

    def judged(first: int, last: int) -> Comparison:
        compared = Comparison()
        judge.part(*_part(judge.ops, module, values, nodes[cuts[first] : cuts[last]]), compared)
        return compared

    low, high, found = 0, len(cuts) - 1, whole
    while high - low > 1:  # the prefix up to `high` fails
        middle = (low + high) // 2
        compared = judged(0, middle)
        low, high, found = (low, middle, compared) if compared.reason else (middle, high, found)
    first, last = 0, high
    while last - first > 1:  # the part from `first` to `high` fails
        middle = (first + last) // 2
        compared = judged(middle, high)
        first, last, found = (middle, last, compared) if compared.reason else (first, middle, found)
    return nodes[cuts[first] : cuts[high]], found


def _cuts(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the positions at which only tensors and sizes are passed on, both ends included."""
    position = {node: index for index, node in enumerate(nodes)}
    allowed = [True] * (len(nodes) + 1)
    for node, index in position.items():
        value = value_of(node)
        last = max((position.get(user, len(nodes)) for user in node.users), default=index)
        if not isinstance(value, (Tensor, int, torch.SymInt)):
            for between in range(index + 1, min(last, len(nodes) - 1) + 1):
                allowed[between] = False
    return [index for index, fine in enumerate(allowed) if fine or index in (0, len(nodes))]


def _part(
    ops: OpTargets, module: fx.GraphModule, values: Sequence[Any], nodes: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[Any]]:
    """Return consecutive nodes as a separate graph, and the values of its placeholders when the whole graph gets there.

    Its outputs are what later nodes use of it.
    """
    inside = dict.fromkeys(nodes)
    taken = dict.fromkeys(source for node in inside for source in node.all_input_nodes if source not in inside)
    given = [node for node in inside if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in taken:
        copied[node] = graph.placeholder(node.name)
        copied[node].meta = dict(node.meta)
    for node in inside:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in given))
    named = as_ops(module, ops)
    state = _State(named, nodes[0], taken)
    run_graph(module, values, watchers=[state], written=written_inputs(named))
    return fx.GraphModule(module, graph), [state.seen[node] for node in taken]


class _Layouts(Watcher):
    """Finds the first node whose value has other strides than its fake value, on which later nodes rely."""

    def __init__(self) -> None:
        self.wrong: fx.Node | None = None
        self.problem = ""

    def after(self, node: fx.Node, value: Any) -> None:
        """Compare tensors whose strides the fake tells as numbers."""
        fake = value_of(node)
        known = isinstance(fake, Tensor) and all(isinstance(size, int) for size in (*fake.shape, *fake.stride()))
        if self.wrong is None and known and (problem := strides_problem(value, fake)):
            self.wrong, self.problem = node, f"{node_text(node)} gave {problem} that its fake says"


class _State(Watcher):
    """Saves the values of some nodes when a run reaches a certain node."""

    def __init__(self, named: fx.GraphModule, start: fx.Node, wanted: Mapping[fx.Node, Any]) -> None:
        self.seen: dict[fx.Node, Any] = {}
        self._start, self._wanted = start, wanted
        self._changing = changing_nodes(named)

    def before(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        """Copy what is written in this graph: it goes on changing."""
        if node is self._start:
            copies = Copies()
            self.seen = {
                each: copies.of(env[each]) if each.name in self._changing else env[each] for each in self._wanted
            }
