"""core/common/passes/linear/merge_lora.py: what adapters add to the slices of a merged linear becomes one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.common.numerics import judge
from core.common.passes.cleanup.cse import ELIMINATE_COMMON_SUBEXPRESSIONS
from core.common.passes.linear.merge import MERGE_LINEARS
from core.common.passes.linear.merge_lora import MERGE_LORA
from core.common.passes.mlp.gate_up import FUSE_GATE_UP
from core.common.passes.mlp.gated_activation import LIFT_GATED_ACTIVATION
from core.compilation.rewrite.manager import PassManager
from core.compilation.trace.tracing import trace
from core.engine.lora.layers import AdaptedLayer, AdapterStep, attach
from core.verify.execution import run_graph
from tests.common.passes.linear.merging import Decoder, Pair, constants_of, tokens

RANK, SLOTS = 4, 3
PASSES = (LIFT_GATED_ACTIVATION, ELIMINATE_COMMON_SUBEXPRESSIONS, MERGE_LINEARS, MERGE_LORA, FUSE_GATE_UP)


def adapted(model: nn.Module, without: str = "", ranks: int = RANK, apart: bool = False) -> dict[str, AdaptedLayer]:
    """Give every linear but one three adapters; the tokens of a call have them, and none, in turn."""
    torch.manual_seed(5)
    step, layers = AdapterStep(torch.arange(10) % (SLOTS + 1)), {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != without:
            dtype, rank = module.weight.dtype, ranks if path == "b" else RANK
            a = torch.randn(SLOTS * rank, module.in_features) * module.in_features**-0.5
            b = torch.randn(module.out_features, SLOTS * rank)
            own = AdapterStep(torch.arange(10) % 2) if apart and path == "b" else step
            layers[path] = AdaptedLayer(a.to(dtype), b.to(dtype), rank, own)
    attach(model, layers)
    return layers


class Merged:
    """A function of x, traced and merged."""

    def __init__(self, function: Callable[..., Any], x: Tensor) -> None:
        self.graph, self.x = trace(lambda x: function(x), {"x": x}), x
        self.constants = constants_of(self.graph)
        before, exact = self.run(), self.run(fp64=True)
        reports = PassManager(PASSES, strict=True).run(self.graph.module, constants=self.constants)
        self.matched = {report.name: report.matched for report in reports}
        self.misses = [miss.reason for report in reports if report.name == "merge_lora" for miss in report.near_misses]
        for result, old, truth in zip(self.run(), before, exact, strict=True):
            assert judge(result, old, truth).passed, judge(result, old, truth).reason

    def run(self, *, fp64: bool = False) -> list[Tensor]:
        added = [tensor for _, tensor in self.constants.added]
        return list(run_graph(self.graph.module, [*self.graph.values({"x": self.x}), *added], fp64=fp64).outputs)

    def sizes(self) -> list[list[int]]:
        target = torch.ops.core.add_lora.default
        return [node.kwargs["sizes"] for node in self.graph.module.graph.nodes if node.target is target]


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_projections_have_one_call_and_gates_read_it_whole(dtype: torch.dtype) -> None:
    model = Decoder(2, dtype=dtype)
    layers = adapted(model)
    held = {path: (layer.a.clone(), layer.b.clone()) for path, layer in layers.items()}
    found = Merged(model, tokens(dtype))
    assert found.misses == []
    assert [found.matched[name] for name in ("merge_linears", "merge_lora", "fuse_gate_up")] == [4, 4, 2]
    assert found.sizes() == [[64, 32, 32], [64], [128, 128], [64]] * 2
    for path, (a, b) in held.items():  # the same tensors, at other places
        assert torch.equal(layers[path].a, a) and torch.equal(layers[path].b, b)
    first = [layers[f"layers.0.self_attn.{name}_proj"].a for name in "qkv"]
    assert len({each.untyped_storage().data_ptr() for each in first}) == 1


def test_an_adapter_that_is_written_later_is_in_the_merged_call() -> None:
    model = Decoder(1)
    layers = adapted(model)
    found = Merged(model, tokens())
    for layer in layers.values():
        layer.a[RANK : 2 * RANK].neg_()
    (result,) = found.run()
    torch.testing.assert_close(result, model(found.x), rtol=1e-4, atol=1e-4)


def test_a_second_graph_of_the_model_binds_the_same_memory() -> None:
    model = Decoder(1)
    adapted(model)
    first, second = Merged(model, tokens()), Merged(model, tokens(num=5))
    added = [dict(each.constants.added) for each in (first, second)]
    assert len(added[0]) == 6 and all(added[0][name].data_ptr() == added[1][name].data_ptr() for name in added[0])


def plain(pair: Pair, x: Tensor) -> Any:
    return pair.a(x).sin() * pair.b(x)


def kept(pair: Pair, x: Tensor) -> Any:
    return pair.a(x), pair.b(x).sin()


def test_slices_of_rows_stay() -> None:
    """What `merge_linears` never makes."""
    a, b, slots = torch.randn(3 * RANK, 8), torch.randn(8, 3 * RANK), torch.arange(5) % 3

    def rows(x: Tensor) -> Tensor:
        added = [torch.ops.core.add_lora(part, x[:5] * 2, a, b, slots, rank=RANK, sizes=[8]) for part in x.split(5)]
        return torch.cat(added)

    graph = trace(rows, {"x": torch.randn(10, 8)})
    (report,) = PassManager([MERGE_LORA], strict=True).run(graph.module, constants=constants_of(graph))
    assert report.matched == 0 and "does not split columns" in report.near_misses[0].reason


NEAR_MISSES: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "one has none": (plain, {"without": "a"}, "one of its slices has readers beside what adapters add"),
    "another rank": (plain, {"ranks": 8}, "another rank"),
    "other slots": (plain, {"apart": True}, "another slots"),
    "a result that is returned": (kept, {}, "is returned, or written later"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_what_is_not_one_call_stays(case: str) -> None:
    function, options, message = NEAR_MISSES[case]
    pair = Pair(function)
    adapted(pair, **options)
    found = Merged(pair, tokens())
    assert (found.matched["merge_linears"], found.matched["merge_lora"]) == (1, 0)
    assert len(found.misses) == 1 and message in found.misses[0]
