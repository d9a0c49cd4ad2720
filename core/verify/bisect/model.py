"""Compares the finished callable with the model itself, run eagerly, which no comparison of two graphs can replace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.verify.bisect.report import Fault, Outcome, Step
from core.verify.compare import Comparison
from core.verify.execution import Run, own_inputs, run_graph, written_inputs

if TYPE_CHECKING:
    from core.engine.check.graphs import PhaseGraph


def judge_model(
    graph: PhaseGraph, original: fx.GraphModule, outputs: Sequence[Sequence[Any]], *, owner: str
) -> tuple[Step, Fault | None]:
    """Judge a lowered graph's outputs by the model's own function, both against an fp64 run of the graph as traced.

    Caches that the model writes are put back. Skipped where the phase has no function.

    outputs: of the lowered graph, for the first sets of examples.
    """

    def step(outcome: Outcome, found: Comparison, note: str = "") -> Step:
        return Step(
            phase=graph.phase,
            kind="model",
            name="program",
            owner=owner,
            outcome=outcome,
            num_values=found.num_values,
            worst_ratio=found.worst,
            note=found.unjudged or note,
        )

    found = Comparison()
    if graph.function is None:
        return step("skipped", found, "the phase has no function to run eagerly"), None
    name = "program"
    for example, given, values in zip(graph.examples, outputs, graph.values(), strict=False):
        eager = _eager(graph, original, example, values)
        run = run_graph(original, values)

        def exact(example: Mapping[str, Tensor] = example, values: Sequence[Any] = values, run: Run = run) -> list[Any]:
            wide = run_graph(original, values, fp64=True, pinned=run.decided)
            return _leaves(graph, wide.outputs, example)

        # Judge the trace first, then the program: a model that differs from its own trace is no yardstick.
        names = [f"output {index}" for index in range(len(eager))]
        if found.add(names, eager, _leaves(graph, run.outputs, example), exact):
            name = "trace"
            break
        if found.add(names, _leaves(graph, given, example), eager, exact):
            break
    if not outputs:
        return step("skipped", found, "there is no program: its lowering failed"), None
    if not found.reason:
        return step(found.outcome, found), None
    fault = Fault(
        phase=graph.phase,
        kind="model",
        name=name,
        owner=owner,
        site="",
        nodes=(),
        reason=found.reason,
        ratio=found.ratio,
    )
    return step("fault", found), fault


def _eager(
    graph: PhaseGraph, original: fx.GraphModule, example: Mapping[str, Tensor], values: Sequence[Any]
) -> list[Any]:
    """Run the model itself; return the leaves of what it gives, as they are before its caches are put back."""
    assert graph.function is not None
    with torch.no_grad(), _kept(original, values):
        result = graph.function(**example)
        return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(result)]


@contextmanager
def _kept(original: fx.GraphModule, values: Sequence[Any]) -> Iterator[None]:
    """Restore the tensors that the model writes, which are those that its graph writes."""
    written = written_inputs(original)
    copies = own_inputs(original, values, written=written)
    kept = [(value, copies[name]) for name, value in zip(copies, values, strict=True) if name in written]
    try:
        yield
    finally:
        for value, before in kept:
            value.copy_(before)


def _leaves(graph: PhaseGraph, outputs: Sequence[Any], example: Mapping[str, Tensor]) -> list[Any]:
    return pytree.tree_leaves(graph.traced.output.rebuild(list(outputs), example))
