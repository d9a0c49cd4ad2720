"""A lowered graph against the same graph run op by op, and the smallest part of it that the lowering gets wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.common.lowering import Lowering, LoweringRequest
from core.common.node_meta import value_of
from core.common.passes.sites import site_name
from core.common.passes.writes import find_writes
from core.compilation.rewrite.snapshot import Snapshot
from core.verify.bisect.ops import OpTargets, as_ops
from core.verify.bisect.report import Fault, Progress, Step
from core.verify.compare import Comparison
from core.verify.execution import Copies, error_line, own_inputs, run_graph, written_inputs


@dataclass(frozen=True, slots=True)
class _Judged:
    """The comparison of one part of a graph, and what its lowering gave."""

    compared: Comparison
    outputs: tuple[Any, ...] = ()


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

    ops: which canonical op a node of the graph was. Returns also what the lowered graph gave for each set of inputs, up
    to one that fails. Narrowing lowers parts of the graph again, about `2 * log2(nodes)` times.
    """
    judge = _Judge(lowering, ops)
    total = Comparison()
    given: list[tuple[Any, ...]] = []
    fault: Fault | None = None
    for values in inputs:
        judged = judge.part(module, values, total)
        given += [judged.outputs] if judged.outputs else []
        if total.reason:
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

    def part(self, module: fx.GraphModule, values: Sequence[Any], into: Comparison | None = None) -> _Judged:
        """Judge the lowering of one graph on one set of inputs; into: where to count it."""
        compared = Comparison() if into is None else into
        # What implementations write, and what they compute in fp64, their ops know.
        named = as_ops(module, self.ops)
        written = written_inputs(named)
        old = run_graph(module, values, written=written)
        own = own_inputs(module, values, written=written)
        try:
            # A lowering owns its graph and may change it.
            graph = Snapshot(module).module()
            lowered = self._lowering(LoweringRequest(graph=graph, example_inputs=tuple(own.values())))
            with torch.no_grad():
                outputs = list(lowered(*own.values()))
        except Exception as error:
            compared.fail("the lowered graph", f"it raised {error_line(error)}")
            return _Judged(compared)
        if len(outputs) != len(old.outputs):
            compared.fail("the outputs", f"{len(outputs)} instead of {len(old.outputs)}")
            return _Judged(compared)
        names = [*_output_names(module), *(f"written {name}" for name in old.written)]
        news = [*outputs, *(own[name] for name in old.written)]
        olds = [*old.outputs, *old.written.values()]

        def exact() -> list[Any]:
            run = run_graph(named, values, fp64=True, pinned=old.decided)
            return [*run.outputs, *(run.written[name] for name in old.written)]

        compared.add(names, news, olds, exact)
        return _Judged(compared, tuple(outputs))


def _output_names(module: fx.GraphModule) -> list[str]:
    return [f"value {node}" for node in pytree.tree_leaves(module.graph.output_node().args[0])]


def _narrow(
    judge: _Judge, module: fx.GraphModule, values: Sequence[Any], whole: Comparison
) -> tuple[list[fx.Node], Comparison]:
    """Return the nodes of the smallest part found that fails alone, and its comparison.

    First the shortest failing prefix, then its shortest failing end; a part is cut only where tensors and sizes cross.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    cuts = _cuts(nodes)
    low, high, found = 0, len(cuts) - 1, whole
    while high - low > 1:  # the prefix up to `high` fails
        middle = (low + high) // 2
        compared = judge.part(*_part(judge.ops, module, values, nodes[: cuts[middle]])).compared
        low, high, found = (low, middle, compared) if compared.reason else (middle, high, found)
    end = cuts[high]
    first, last = 0, high
    while last - first > 1:  # the part from `first` fails
        middle = (first + last) // 2
        compared = judge.part(*_part(judge.ops, module, values, nodes[cuts[middle] : end])).compared
        first, last, found = (middle, last, compared) if compared.reason else (first, middle, found)
    return nodes[cuts[first] : end], found


def _cuts(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the positions at which nothing but tensors and sizes is passed on, both ends included."""
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
    """Return neighbouring nodes as a graph of their own, and what its placeholders hold when the whole gets there.

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


class _State:
    """Notes what some nodes hold when a run gets to a certain node."""

    def __init__(self, named: fx.GraphModule, start: fx.Node, wanted: Mapping[fx.Node, Any]) -> None:
        self.seen: dict[fx.Node, Any] = {}
        self._start, self._wanted = start, wanted
        writes = find_writes(named)
        changing = frozenset().union(*writes.written.values())
        self._changing = {node.name for node in named.graph.nodes if writes.of(node) & changing}

    def before(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        """Copy what is written in this graph: it goes on changing."""
        if node is self._start:
            copies = Copies()
            self.seen = {
                each: copies.of(env[each]) if each.name in self._changing else env[each] for each in self._wanted
            }

    def after(self, node: fx.Node, value: Any) -> None:
        """Do nothing."""
