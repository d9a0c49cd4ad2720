"""What the tests of the norm and gate lifts share: tracing, running before and after, and tiny models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.common.passes.declaration import Pass
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.execution import run_graph

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = (F32, BF16)


def draw(*shape: int, dtype: torch.dtype = F32, scale: float = 1.0, shift: float = 0.0, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift).to(dtype)


@dataclass(frozen=True)
class Lifted:
    """A function's graph after the passes: what each pass reported, the results before and after, and those in fp64."""

    graph: TracedGraph
    reports: Mapping[str, PassReport]
    before: list[Any]
    after: list[Any]
    exact: list[Any]

    def count(self, target: object) -> int:
        return len(self.calls(target))

    def calls(self, target: object) -> list[fx.Node]:
        return [node for node in self.graph.module.graph.nodes if node.target is target]

    def reasons(self, name: str) -> str:
        return "; ".join(miss.reason for miss in self.reports[name].near_misses)

    @property
    def is_equal(self) -> bool:
        return all(torch.equal(old, new) for old, new in zip(self.before, self.after, strict=True))


def lifted(function: Callable[..., Any], *passes: Pass, **inputs: Tensor) -> Lifted:
    """Trace a function of named tensors, run the passes, and run the graph before and after."""
    return lifted_graph(trace(lambda **named: function(**named), inputs), inputs, *passes)


def lifted_graph(graph: TracedGraph, inputs: Mapping[str, Tensor], *passes: Pass) -> Lifted:
    values = graph.values(inputs)
    before = run_graph(graph.module, values).outputs
    exact = run_graph(graph.module, values, fp64=True).outputs
    reports = {report.name: report for report in PassManager(passes, strict=True).run(graph.module)}
    after = run_graph(graph.module, values).outputs
    return Lifted(graph, reports, before, after, exact)


def traced_model(name: str, dtype: torch.dtype, num_tokens: int = 9) -> tuple[TracedGraph, dict[str, Tensor], int]:
    """Trace a tiny transformers model; return it with its inputs and the number of RMSNorms that ran, by hooks.

    A process traces each once, and each test gets a graph of its own.
    """
    graph, inputs, num_norms = _traced_once(name, dtype, num_tokens)
    return replace(graph, module=Snapshot(graph.module).module()), dict(inputs), num_norms


@cache
def _traced_once(name: str, dtype: torch.dtype, num_tokens: int) -> tuple[TracedGraph, dict[str, Tensor], int]:
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config

    model: Any = build_model(tiny_config(name), torch_device=torch.device("cpu"), dtype=dtype).model
    inputs = {"input_ids": torch.arange(3, 3 + num_tokens)[None], "position_ids": torch.arange(num_tokens)[None]}
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    ran: Counter[nn.Module] = Counter()
    hooks = [norm.register_forward_hook(lambda module, *_: ran.update([module])) for norm in norms]
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    graph = trace(lambda input_ids, position_ids: model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False
    ).logits, inputs)  # fmt: skip
    return graph, inputs, ran.total()
