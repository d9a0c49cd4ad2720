"""Dividing a trace among buckets that passes want to rewrite differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from core.compilation.shared_trace import copy_graph

if TYPE_CHECKING:
    from core.common.graphs.backend import GraphKey
    from core.compilation.capture.buffers import StaticBuffers
    from core.compilation.phases.tracer import ServedTrace
    from core.compilation.rewriting import Rewriter


def divided(served: Sequence[ServedTrace], rewriter: Rewriter, buffers: StaticBuffers) -> Iterator[ServedTrace]:
    """Yield the traces, each once for all of its keys of which passes say the same (`PassTraits.tells_apart`).

    What is yielded has a graph of its own, over the same tensors and symbols.
    """
    for trace in served:
        # A trace that counts holds for some numbers alone, which its graph stands for.
        sizes = [] if trace.graph.counters else [trace.graph.sizes(buffers.views(key)) for key in trace.keys]
        groups: dict[Any, list[GraphKey]] = {}
        for key, said in zip(trace.keys, rewriter.manager.told_apart(trace.graph.module, sizes), strict=False):
            groups.setdefault(said, []).append(key)
        if len(groups) < 2:
            yield trace
            continue
        for number, keys in enumerate(groups.values()):
            graph = replace(trace.graph, module=copy_graph(trace.graph.module, lazy=True))
            yield replace(
                trace,
                keys=tuple(keys),
                graph=replace(graph, elapsed_s=0.0) if number else graph,
                trace_of=trace.trace_of or (keys[0].phase if number else ""),
                reason="passes rewrite other buckets of the trace differently" if number else trace.reason,
            )
