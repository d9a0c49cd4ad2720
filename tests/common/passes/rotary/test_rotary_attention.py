"""core/common/passes/rotary/attention.py: a rotation goes into the attention after it, bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.canonical import OPS
from core.common.ops.implementation import OpImplementation
from core.common.ops.rotary.rotation import QK_NORM_ROTARY, ROTARY
from core.common.passes.rotary.attention import FUSE_ROTARY_ATTENTION
from core.common.passes.rotary.attention_examples import examples
from core.common.passes.standard import COMMON_PASSES
from core.compilation.implementations import BREAK_POINT, choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewriting import bound_constants
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.execution import Run, run_graph
from tests.common.passes.rotary.rotated_attention import (
    CACHES,
    FORMS,
    NEAR_MISSES,
    Cached,
    D,
    H,
    K,
    Model,
    T,
    attend,
    heads,
    heads_first,
    inputs_of,
    written_between,
)
from tests.marks import slow_except

NAME = FUSE_ROTARY_ATTENTION.name
BRINGS = frozenset({ROTARY_ATTENTION.qualified_name})
EVERYTHING = frozenset(op.qualified_name for op in OPS)
F32, BF16 = torch.float32, torch.bfloat16


def calls(module: fx.GraphModule, target: object = ROTARY_ATTENTION.overload) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


def targets(module: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in module.graph.nodes if node.op.startswith("call_"))


def same(one: Run, other: Run) -> bool:
    """Tell whether two runs give the same bits and write the same; of a finished graph, all may be written."""
    outputs = zip(one.outputs, other.outputs, strict=True)
    small, large = sorted((one, other), key=lambda run: len(run.written))
    one, other = small, large
    return all(torch.equal(a, b) for a, b in outputs) and all(
        torch.equal(value, other.written[name]) for name, value in one.written.items()
    )


# Tiny models on the engine's paged cache.


@cache
def graph_of(model_type: str, dtype: torch.dtype) -> Any:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    from core.engine.check.graphs import engine_graphs
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.host.selection import select_device

    loaded = build_model(tiny_config(model_type), torch_device=torch.device("cpu"), dtype=dtype)
    phase = "prefill" if dtype == BF16 else "decode"
    with engine_graphs(loaded, select_device("cpu"), phases=(phase,)) as (graph,):
        return graph


@dataclass(frozen=True)
class Rewritten:
    """A copy of a graph after all passes, as it was before the one in question, that one's report, values to run on."""

    module: fx.GraphModule
    before: fx.GraphModule | None
    report: PassReport
    values: list[list[Any]]

    def runs(self, module: fx.GraphModule | None) -> list[Run]:
        assert module is not None
        return [run_graph(module, values) for values in self.values]


def rewritten(graph: Any, implemented: frozenset[str]) -> Rewritten:
    module, constants = Snapshot(graph.traced.module).module(), bound_constants(graph.traced)
    seen: dict[str, fx.GraphModule] = {}

    def check(report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> None:
        seen[report.name] = before

    manager = PassManager(COMMON_PASSES, strict=True, implemented=implemented)
    reports = {report.name: report for report in manager.run(module, constants=constants, check=check)}
    added = [tensor for _, tensor in constants.added]
    return Rewritten(module, seen.get(NAME), reports[NAME], [[*values, *added] for values in graph.values()])


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"normalize": False, "style": "half"},
    "qwen3": {"normalize": True, "offset": 0.0, "eps": 1e-6},
    "gemma3_text": {"normalize": True, "offset": 1.0},
    "qwen3_moe": {"normalize": True},
    "glm": {"style": "interleaved", "rotary_dim": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype"),
    slow_except(
        [*((model, F32) for model in MODELS), *((model, BF16) for model in ("llama", "gemma3_text"))],
        ("llama", F32),
        ("qwen3", F32),
    ),
    ids=str,
)
def test_each_layer_of_a_model_is_fused_and_no_bit_changes(model: str, dtype: torch.dtype) -> None:
    graph = graph_of(model, dtype)
    found = rewritten(graph, BRINGS)
    module, report = found.module, found.report
    assert (report.matched, report.near_misses) == (2, ())
    assert [site.startswith("model.layers.") for site in report.sites] == [True, True]
    assert not [*calls(module, ATTENTION.overload), *calls(module, ROTARY.overload)]
    assert not calls(module, QK_NORM_ROTARY.overload) and len(calls(module)) == 2
    assert all(map(same, found.runs(found.before), found.runs(module)))
    for node in calls(module):
        bound = ROTARY_ATTENTION.bind(node.args, node.kwargs).args
        assert {name: bound[name] for name in MODELS[model]} == MODELS[model]
        ranks = {name: bound[name].meta["example_value"].ndim for name in ("query", "key", "value", "cos", "sin")}
        assert ranks == {"query": 3, "key": 3, "value": 3, "cos": 2, "sin": 2}
    assert len({node.args[3] for node in calls(module)}) == (2 if model == "gemma3_text" else 1)  # one view of a table


@pytest.mark.slow
@pytest.mark.parametrize("model", slow_except(["llama", "qwen3"], "qwen3"))
def test_a_device_that_does_not_bring_the_op_keeps_its_graph(model: str) -> None:
    graph = graph_of(model, F32)
    found = rewritten(graph, EVERYTHING - BRINGS)
    module, report = found.module, found.report
    assert report.skipped == "the device does not implement core::rotary_attention" and report.matched == 0
    assert not calls(module) and len(calls(module, ATTENTION.overload)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("model", slow_except(["llama", "qwen3", "glm"], "qwen3"))
def test_an_implementation_that_refuses_gives_the_models_own_nodes_back(model: str) -> None:
    graph = graph_of(model, F32)
    found = rewritten(graph, BRINGS)
    module = found.module
    other = OpImplementation(
        op=ROTARY_ATTENTION.qualified_name, name="picky", fn=torch.relu, condition=lambda call: "not today"
    )
    choices = choose_implementations(module, [other], mark=(ATTENTION.qualified_name, ROTARY_ATTENTION.qualified_name))
    chosen = {choice.op: choice.implementation for choice in choices}
    assert chosen["core::rotary_attention"] == "original" and chosen["core::attention"] == "eager reference"
    cut = [node.meta[BREAK_POINT] for node in module.graph.nodes if BREAK_POINT in node.meta]
    assert cut == ["core::attention"] * 2
    plain = Snapshot(found.before).module()  # type: ignore[arg-type]  # the pass has run
    choose_implementations(plain, (), mark=(ATTENTION.qualified_name,))
    assert targets(module) == targets(plain)  # no view is left of what the op would have had
    for one, other in zip(found.runs(found.before), found.runs(module), strict=True):
        # Attention by sequence rounds otherwise than all of it at once.
        torch.testing.assert_close(other.outputs[0], one.outputs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_piecewise_graphs_are_cut_at_the_op() -> None:
    module = rewritten(graph_of("llama", F32), BRINGS).module
    own = OpImplementation(op=ROTARY_ATTENTION.qualified_name, name="own", fn=ROTARY_ATTENTION.reference)
    choices = choose_implementations(module, [own], mark=[op.qualified_name for op in OPS if op.break_point])
    assert [choice.implementation for choice in choices if choice.op == ROTARY_ATTENTION.qualified_name] == ["own"] * 2
    cut = [node.meta[BREAK_POINT] for node in module.graph.nodes if BREAK_POINT in node.meta]
    assert cut == ["core::rotary_attention"] * 2


# Every form of one rotation and one attention.


def fused(
    model: Model, inputs: Mapping[str, Tensor], dynamic: Any = None, passes: tuple[Any, ...] = (FUSE_ROTARY_ATTENTION,)
) -> tuple[TracedGraph, PassReport]:
    """Run the pass on a model, and check that no bit has changed, with the old nodes back neither."""
    module = model if isinstance(model, nn.Module) else Cached(model, inputs["x0" if "x0" in inputs else "query"].dtype)
    graph = trace(lambda **given: module(**given), dict(inputs), dynamic=dynamic)
    values = graph.values(dict(inputs))
    before = run_graph(graph.module, values)
    *_, report = PassManager(passes, strict=True, implemented=BRINGS).run(graph.module)
    assert same(before, run_graph(graph.module, values))
    restored = Snapshot(graph.module).module()
    choose_implementations(restored, ())
    assert same(before, run_graph(restored, values)) and not calls(restored)
    return graph, report


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_fused(form: str, dtype: torch.dtype) -> None:
    graph, report = fused(FORMS[form], inputs_of(dtype))
    assert (report.matched, report.near_misses) == (1, ())
    (node,) = calls(graph.module)
    shapes = [tuple(arg.meta["example_value"].shape) for arg in node.args[:5]]
    assert shapes[:3] == [(T, H, D), (T, K, D), (T, K, D)] and [len(shape) for shape in shapes[3:]] == [2, 2]
    copies = ("contiguous", "clone", torch.clone, "reshape")
    assert not [node for node in graph.module.graph.nodes if node.target in copies]


@pytest.mark.slow
def test_symbolic_token_counts_are_no_obstacle() -> None:
    dims = {name: [1] for name in ("query", "key", "value", "cos", "sin")} | {"slot_mapping": [0]}
    _, report = fused(heads_first, inputs_of(BF16), dims)
    assert report.matched == 1


class Positional(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **given: Tensor) -> Any:
        return self.module(*given.values())


def test_the_examples_of_the_pass_owe_a_match_each() -> None:
    found = list(examples())
    assert len(found) == 3
    for module, tensors in found:
        inputs = {f"x{index}": tensor for index, tensor in enumerate(tensors)}
        _, report = fused(Positional(module), inputs)
        assert report.matched == 1


# What must not match.


@pytest.mark.cases(5)
@pytest.mark.parametrize("model", NEAR_MISSES, ids=lambda model: model.__name__)
def test_near_misses_stay_as_they_are_with_the_reason(model: Model) -> None:
    module = Cached(model, F32)
    graph = trace(lambda **given: module(**given), inputs_of(F32))
    before = [(node.name, node.target, node.args, node.kwargs) for node in graph.module.graph.nodes]
    (report,) = PassManager((FUSE_ROTARY_ATTENTION,), strict=True, implemented=BRINGS).run(graph.module)
    assert report.matched == 0
    (miss,) = report.near_misses
    assert NEAR_MISSES[model] in miss.reason
    after = [(node.name, node.target, node.args, node.kwargs) for node in graph.module.graph.nodes]
    assert after == before


def test_an_attention_without_a_rotation_is_no_near_miss() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **places: Tensor) -> Tensor:
        return attend(*(heads(x)[0] for x in (query, key, value)), places)

    _, report = fused(model, inputs_of(F32))
    assert (report.matched, report.near_misses) == (0, ())


def test_a_refused_site_leaves_the_others_alone() -> None:
    """Two layers share their tables; the first one's query is written in between."""

    def model(**given: Tensor) -> tuple[Tensor, Tensor]:
        second = {name: given[name].clone() for name in CACHES}
        return written_between(**given), heads_first(**{**given, **second})

    graph, report = fused(model, inputs_of(F32))
    assert (report.matched, len(report.near_misses)) == (1, 1)
    assert len(calls(graph.module, ROTARY.overload)) == len(calls(graph.module)) == 1


def test_a_second_run_finds_nothing() -> None:
    graph, _ = fused(heads_first, inputs_of(F32))
    (report,) = PassManager((FUSE_ROTARY_ATTENTION,), strict=True, implemented=BRINGS).run(graph.module)
    assert (report.matched, report.near_misses) == (0, ())
    unguarded = replace(FUSE_ROTARY_ATTENTION, guards=type(FUSE_ROTARY_ATTENTION.guards)())
    (report,) = PassManager((unguarded,), strict=True).run(graph.module)
    assert report.matched == 0
