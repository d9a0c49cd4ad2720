"""The trace that the phases of the paged route share: equal to a trace of each phase alone, or not shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.compilation.options import CompileOptions
from core.compilation.rewriting import Rewriter
from core.compilation.shared_trace import SharedTrace
from core.compilation.trace.traced import ConstantSlot, TracedGraph
from core.compilation.trace.tracing import trace
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.paged.runner import PagedRunner
from core.engine.steps.inputs import step_inputs
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device
from tests.marks import slow_except

LENGTH = 40
SIZES = {"prefill": {"tokens": 24, "seqs": 2, "rows": 3}, "decode": {"tokens": 4, "seqs": 4, "rows": 4}}
ONE = {"tokens": 1, "seqs": 1, "rows": 1}


def tiny(model_type: str, **changes: Any) -> Any:
    return build_model(tiny_config(model_type, **changes), torch_device=torch.device("cpu"), dtype=torch.float32).model


@contextmanager
def runner_of(model: Any, **options: Any) -> Iterator[PagedRunner]:
    given = {"options": CompileOptions(lowering="inline")} | options
    config = EngineConfig(max_num_seqs=2, block_size=8, sampling=("greedy",), **given)
    with torch.inference_mode(False):
        runner = PagedRunner(model, select_device("cpu"), config, max_model_len=LENGTH)
    try:
        yield runner
    finally:
        runner.close()


def inputs_of(runner: PagedRunner, sizes: dict[str, int]) -> dict[str, Tensor]:
    declared = step_inputs(runner._max_blocks, runner.num_groups)
    return {name: torch.zeros(spec.resolve(sizes), dtype=spec.dtype) for name, spec in declared.items()}


def traced(runner: PagedRunner, phase: str) -> TracedGraph:
    declared = step_inputs(runner._max_blocks, runner.num_groups)
    dynamic = {name: [d for d, size in enumerate(s.shape) if isinstance(size, str)] for name, s in declared.items()}
    return trace(runner._calls[phase], inputs_of(runner, SIZES[phase]), dynamic=dynamic, least=1)


def described(graph: TracedGraph) -> list[str]:
    """Return each node with all that it computes and is: ops, arguments, sizes, strides and dtypes.

    By position: new nodes of a copied graph are numbered otherwise.
    """
    lines = []
    positions = {node: f"%{index}" for index, node in enumerate(graph.module.graph.nodes)}
    for node in graph.module.graph.nodes:
        value = node.meta.get("example_value")
        like = (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
        arguments = fx.map_arg((node.args, dict(node.kwargs)), positions.__getitem__)
        lines.append(f"{node.op} {node.target} {arguments} {like}")
    return lines


@pytest.mark.parametrize("model_type", slow_except(("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt2"), "llama"))
def test_the_decode_graph_of_the_shared_trace_is_that_of_a_trace_of_decode(model_type: str) -> None:
    changes = {"num_hidden_layers": 1} if model_type == "llama" else {}
    with runner_of(tiny(model_type, **changes), options=CompileOptions(mode="off")) as runner:
        lens = runner._lens
        shared = SharedTrace(op="core::attention", argument="max_query_len", values=lens)
        prefill, alone = traced(runner, "prefill"), traced(runner, "decode")
        assert shared.calls_have(prefill.module, lens["prefill"])
        derived = shared.for_phase(prefill, "decode")
        assert described(derived) == described(alone) != described(prefill)
        slots = [
            slot.value is other.value if isinstance(slot, ConstantSlot) and isinstance(other, ConstantSlot) else
            slot == other
            for slot, other in zip(derived.slots, alone.slots, strict=True)
        ]  # fmt: skip
        assert all(slots)
        assert [str(guard.expr) for guard in derived.shape_env.guards] == [
            str(guard.expr) for guard in alone.shape_env.guards
        ]
        for sizes in (*SIZES.values(), ONE):
            assert derived.why_not_for(inputs_of(runner, sizes)) is None
        # Nor do the passes ask anything of which the other phase would have to know.
        rewriter = Rewriter(select_device("cpu"))
        known = len(derived.shape_env.guards)
        after = [described(rewriter.rewrite(graph).traced) for graph in (derived, alone)]
        assert after[0] == after[1] and len(derived.shape_env.guards) == known


def report_of(runner: PagedRunner) -> list[tuple[str, list[int], str]]:
    traces = runner.report().traces
    return [(each.phase, [key.dims[0] for key in each.buckets], each.trace_of) for each in traces]


@pytest.mark.slow
def test_drafts_share_the_trace_too() -> None:
    model = tiny("llama", num_hidden_layers=1)
    with runner_of(model, decode_buckets=(2,), prefill_buckets=(24,), speculative=2) as runner:
        assert report_of(runner) == [
            ("decode", [2], ""),
            ("prefill", [24], "decode"),
            ("verify", [6], "decode"),
        ]
        assert runner.report().num_traces == 1


class Branching(nn.Module):
    """Takes another way, to the same numbers, for steps of more than ten tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * 1.0 if x.shape[1] > 10 else out


@pytest.mark.slow
def test_a_model_that_branches_on_the_number_of_tokens_has_a_trace_for_each_way() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp = Branching(model.model.layers[0].mlp)
    with runner_of(model, decode_buckets=(1, 2), prefill_buckets=(8, 24)) as runner:
        assert report_of(runner) == [
            ("decode", [2, 1], ""),
            ("prefill", [24], ""),
            ("prefill", [8], ""),
        ]
        reasons = [each.reason for each in runner.report().traces]
        assert [bool(reason) for reason in reasons] == [True, False, True] and "has size" in reasons[0]
