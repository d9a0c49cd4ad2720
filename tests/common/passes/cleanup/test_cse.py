"""core/common/passes/cleanup/cse.py: equal calls are made once, no bit changes, and no write is lost or passed by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from core.common.passes.cleanup.cse import ELIMINATE_COMMON_SUBEXPRESSIONS
from core.common.passes.cleanup.no_ops import REMOVE_NO_OPS
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.execution import Run, run_graph
from tests.marks import slow_except

X = torch.linspace(-2.0, 3.0, 12).view(2, 6)
DTYPES = [torch.float32, torch.bfloat16]


def run(graph: TracedGraph, x: Tensor) -> Run:
    torch.manual_seed(5)
    return run_graph(graph.module, graph.values({"x": x}))


def check(function: Callable[..., Any], x: Tensor = X) -> tuple[TracedGraph, PassReport]:
    """Run the pass over the function's graph, and compare outputs and written tensors bit by bit."""
    graph = trace(lambda x: function(x), {"x": x})
    before = run(graph, x)
    (report,) = PassManager([ELIMINATE_COMMON_SUBEXPRESSIONS], strict=True).run(graph.module)
    after = run(graph, x)
    assert all(map(torch.equal, before.outputs, after.outputs))
    assert before.written.keys() == after.written.keys()
    assert all(torch.equal(before.written[name], after.written[name]) for name in before.written)
    return graph, report


def count(graph: TracedGraph, name: str) -> int:
    return sum(str(getattr(n.target, "__name__", n.target)) == name for n in graph.module.graph.nodes)


def mask(x: Tensor, offset: int) -> Tensor:
    rows = torch.arange(2)[:, None] + offset
    return torch.where(torch.arange(6)[None, :] <= rows, x, x.new_zeros(()))


SHARED: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "a function": (lambda x: torch.exp(x) + torch.exp(x) * 2, 1),
    "a method": (lambda x: x.exp() + x.exp() * 2, 1),
    "a chain": (lambda x: (x.cos() * 2).sin() - (x.cos() * 2).sin() * 3, 3),
    "masks": (lambda x: mask(x, 2) + mask(x, 2) * 2, 8),
    "views": (lambda x: x[:, :3].sum() * x[:, :3].neg(), 1),
    "several results": (lambda x: x.topk(2)[0] + x.topk(2)[0].neg(), 2),
    "a size": (lambda x: x.sum(-1).cumsum(0) + x.sum(-1).cumsum(0) ** 2, 2),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SHARED)
def test_equal_calls_are_made_once(case: str, dtype: torch.dtype) -> None:
    function, shared = SHARED[case]
    _, report = check(function, X.to(dtype))
    assert report.matched == shared and report.near_misses == ()


DIFFERENT: dict[str, Callable[[Tensor], Any]] = {
    "another operand": lambda x: x.exp() + x.neg().exp(),
    "an int and a float": lambda x: torch.full((2,), 1).cumsum(0) + torch.full((2,), 1.0).cumsum(0) + x.sum(),
    "a bool and an int": lambda x: torch.full((2,), True).cumsum(0) + torch.full((2,), 1).cumsum(0) + x.sum(),
    "zero and minus zero": lambda x: torch.copysign(x, torch.full((), 0.0)) + torch.copysign(x, torch.full((), -0.0)),
    "another keyword": lambda x: x.sum(-1, keepdim=True) + x.sum(-1, keepdim=False).sum(),
    "indexing by a list": lambda x: x[[0, 1]].sum() + x[0, 1],
    "random numbers": lambda x: torch.rand_like(x) - torch.rand_like(x),
    "another slice": lambda x: x[:, :3] + x[:, 3:],
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", DIFFERENT)
def test_unequal_calls_stay(case: str) -> None:
    _, report = check(DIFFERENT[case])
    assert report.matched == 0


def the_reason(report: PassReport) -> str:
    assert report.matched == 0
    (miss,) = report.near_misses
    return miss.reason


def test_a_read_after_a_write_is_another_one() -> None:
    cache = torch.zeros(2, 6)

    def function(x: Tensor) -> Tensor:
        old = cache.sum(-1)
        cache.add_(x)
        return old + cache.sum(-1) * 2

    graph, report = check(function)
    assert report.matched == 0 and count(graph, "sum") == 2


def test_a_view_taken_before_a_write_is_the_view_taken_after_it() -> None:
    cache = torch.zeros(2, 6)

    def function(x: Tensor) -> Tensor:
        old = cache[:, 1:] + 1
        cache.add_(x)
        return old + cache[:, 1:]

    assert check(function)[1].matched == 1


def test_a_write_through_another_view_counts() -> None:
    cache = torch.zeros(2, 6)

    def function(x: Tensor) -> Tensor:
        left, right = cache[:, :4], cache[:, 2:]
        old = left.exp()
        right.copy_(x[:, :4])
        return old + left.exp() * 2

    assert check(function)[1].matched == 0


def test_a_result_that_is_written_stays_apart() -> None:
    def later(x: Tensor) -> Tensor:
        first, second = x.exp(), x.exp()
        second.add_(1.0)
        return first * second

    def earlier(x: Tensor) -> Tensor:
        first, second = x.exp(), x.exp()
        first.add_(1.0)
        return first * second

    assert "the result is written later" in the_reason(check(later)[1])
    assert "first is written later" in the_reason(check(earlier)[1])


def test_two_outputs_do_not_become_one() -> None:
    assert "must not share memory" in the_reason(check(lambda x: (x.exp(), x.exp()))[1])
    assert "must not share memory" in the_reason(check(lambda x: (x.exp(), x.exp()[0]))[1])
    assert check(lambda x: (x.exp(), x.exp() + 1))[1].matched == 1


def test_modes_are_not_crossed() -> None:
    def function(x: Tensor) -> Tensor:
        outside = x.to(torch.bfloat16) @ x.to(torch.bfloat16).t()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = x.to(torch.bfloat16) @ x.to(torch.bfloat16).t()
        return outside + inside * 2

    graph, report = check(function)
    # What is equal lies on the same side of the switch.
    assert report.matched == 2 and count(graph, "matmul") == 2


def test_each_write_stays_where_it_is() -> None:
    cache = torch.zeros(2, 6)

    def function(x: Tensor) -> Tensor:
        cache.index_copy_(0, torch.arange(2), x.exp())
        cache.add_(1.0)
        cache.add_(1.0)
        return cache + x.exp()

    graph, report = check(function)
    assert report.matched == 1
    assert count(graph, "add_") == 2 and count(graph, "index_copy_") == 1
    (written,) = run(graph, X).written.values()
    assert torch.equal(written, X.exp() + 1.0 + 1.0)


def test_dead_code_goes_and_effects_stay() -> None:
    cache = torch.zeros(2, 6)

    def function(x: Tensor) -> Tensor:
        cache.mul_(0.5).add_(x)
        return x.exp()

    graph = trace(lambda x: function(x), {"x": X})
    nodes = graph.module.graph
    with nodes.inserting_before(nodes.output_node()):
        nodes.call_method("cos", (nodes.call_method("sin", (nodes.find_nodes(op="placeholder")[0],)),))
        nodes.call_method("zero_", (nodes.find_nodes(op="placeholder")[-1],))
    (report,) = PassManager([ELIMINATE_COMMON_SUBEXPRESSIONS], strict=True).run(graph.module)
    assert report.matched == 0
    left = [str(node.target) for node in nodes.nodes if node.op == "call_method"]
    assert left == ["mul_", "add_", "exp", "zero_"]


def test_values_that_are_not_known_stay() -> None:
    module = fx.symbolic_trace(lambda x: x.exp() + x.exp())
    (report,) = PassManager([ELIMINATE_COMMON_SUBEXPRESSIONS], strict=True).run(module)
    assert report.matched == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_except(DTYPES, torch.bfloat16), ids=str)
def test_a_model_keeps_every_bit_and_every_write_of_its_cache(dtype: torch.dtype) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.engine.static.cache import static_phases

    model = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=dtype).model
    for phase in static_phases(model):
        graph = trace(phase.function, phase.inputs)
        values = graph.values(phase.inputs)
        before = run_graph(graph.module, values)
        num_writes = count(graph, "index_copy_") + count(graph, "add_")
        reports = PassManager([REMOVE_NO_OPS, ELIMINATE_COMMON_SUBEXPRESSIONS], strict=True).run(graph.module)
        after = run_graph(graph.module, values)
        # Two caches and one length per layer.
        assert len(before.written) == num_writes == 2 * 3
        assert count(graph, "index_copy_") + count(graph, "add_") == num_writes
        assert all(map(torch.equal, before.outputs, after.outputs))
        assert all(torch.equal(before.written[name], after.written[name]) for name in before.written)
        assert any(bool(tensor.any()) for tensor in after.written.values())
        assert all(report.matched > 2 for report in reports)
