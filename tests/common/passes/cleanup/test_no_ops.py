"""core/common/passes/cleanup/no_ops.py: what computes nothing goes, no bit changes, and no write is lost or doubled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.common.passes.cleanup.no_ops import REMOVE_NO_OPS
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.execution import Run, run_graph

X = torch.tensor([[-0.0, 0.0, float("inf"), float("-inf"), float("nan"), -1.5], [3e38, -1e-45, 2.0, -7.0, 0.1, -0.2]])
DTYPES = [torch.float32, torch.bfloat16]


def run(graph: TracedGraph, *inputs: Tensor) -> Run:
    return run_graph(graph.module, graph.values(dict(zip("xy", inputs, strict=False))))


def same_bits(left: Tensor, right: Tensor) -> bool:
    def bits(t: Tensor) -> Tensor:
        return t.contiguous().flatten().view(torch.uint8)

    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def check(function: Callable[..., Any], *inputs: Tensor) -> tuple[TracedGraph, PassReport]:
    """Run the pass over the function's graph, and compare outputs and written tensors bit by bit."""
    graph = trace(function, dict(zip("xy", inputs, strict=False)))
    before = run(graph, *inputs)
    (report,) = PassManager([REMOVE_NO_OPS], strict=True).run(graph.module)
    after = run(graph, *inputs)
    assert all(map(same_bits, before.outputs, after.outputs))
    assert [t.stride() for t in before.outputs] == [t.stride() for t in after.outputs]
    assert before.written.keys() == after.written.keys()
    assert all(same_bits(before.written[name], after.written[name]) for name in before.written)
    return graph, report


REMOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "cast to the same dtype": lambda x: x.abs().to(x.dtype).neg(),
    "cast by method": lambda x: x.abs().type_as(x).neg(),
    "times one": lambda x: (x.abs() * 1.0).neg(),
    "one times": lambda x: (1 * x.abs()).neg(),
    "over one": lambda x: (x.abs() / 1).neg(),
    "plus minus zero": lambda x: (x.abs().neg() + -0.0).neg(),
    "minus zero": lambda x: (x.abs().neg() - 0).neg(),
    "contiguous": lambda x: x.abs().contiguous().neg(),
    "reshape": lambda x: x.abs().reshape(2, -1).neg(),
    "view": lambda x: x.abs().view(x.shape).neg(),
    "expand": lambda x: x.abs().expand(2, -1).neg(),
    "slice": lambda x: x.abs()[:, 0:6].neg(),
    "detach": lambda x: x.abs().detach().neg(),
    "dropout": lambda x: F.dropout(x.abs(), 0.3, training=False).neg(),
    "clone": lambda x: x.abs().clone().neg(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", REMOVED)
def test_what_computes_nothing_goes(case: str, dtype: torch.dtype) -> None:
    function = REMOVED[case]
    graph, report = check(lambda x: function(x), X.to(dtype))
    assert report.matched == 1 and report.near_misses == ()
    assert len([node for node in graph.module.graph.nodes if node.op.startswith("call_")]) in (2, 3)  # one more neg


def test_integers_plus_zero_go_and_chains_go_whole() -> None:
    numbers = torch.arange(6).view(2, 3)
    assert check(lambda x: (x.abs() + 0).neg(), numbers)[1].matched == 1
    _, report = check(lambda x: ((x.abs() * 1.0).to(x.dtype) * 1.0).contiguous().neg(), X)
    assert report.matched == 4


def test_counting_the_use_of_an_interface_goes() -> None:
    def function(x: Tensor) -> Tensor:
        torch._C._log_api_usage_once("python.test")
        return x.abs()

    assert check(function, X)[1].matched == 1


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "plus zero loses the sign of -0.0": lambda x: (x.abs().neg() + 0.0).neg(),
    "minus minus zero too": lambda x: (x.abs().neg() - -0.0).neg(),
    "another dtype": lambda x: x.abs().to(torch.float64).neg(),
    "through a narrower dtype": lambda x: x.abs().to(torch.float16).to(torch.float32).neg(),
    "promotion": lambda x: ((x > 0) * 1).neg(),
    "complex times one": lambda x: (torch.complex(x, x) * 1).abs(),
    "not contiguous": lambda x: x.abs().t().contiguous().neg(),
    "a smaller slice": lambda x: x.abs()[:, 1:].neg(),
    "broadcast": lambda x: x.abs()[0:1].expand(2, -1).neg(),
    "training dropout": lambda x: F.dropout(x.abs(), 1.0, training=True).neg(),
    "transpose": lambda x: x.abs()[:, :2].t().neg(),
    "a copy with other strides": lambda x: x.abs()[:, :2].clone().neg(),
    "conjugate": lambda x: torch.complex(x, x).conj().resolve_conj().imag.neg(),
    "by two": lambda x: (x.abs() * 2).neg(),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", KEPT)
def test_what_computes_something_stays(case: str) -> None:
    function = KEPT[case]
    num_nodes = len(trace(lambda x: function(x), {"x": X}).module.graph.nodes)
    graph, report = check(lambda x: function(x), X)
    assert report.matched == 0 and len(graph.module.graph.nodes) == num_nodes


def the_reason(report: PassReport) -> str:
    assert report.matched == 0
    (miss,) = report.near_misses
    return miss.reason


def test_a_copy_that_is_written_stays() -> None:
    def function(x: Tensor) -> Tensor:
        base = x.abs()
        copy = base * 1.0
        copy.add_(1.0)
        return base - copy

    assert "the result is written later" in the_reason(check(function, X)[1])


def test_a_copy_of_what_is_written_later_stays() -> None:
    def function(x: Tensor) -> Tensor:
        base = x.abs()
        old = base.clone()
        base[0].mul_(2.0)
        return old + base

    assert "is written later" in the_reason(check(function, X)[1])


def test_a_copy_of_what_was_written_before_goes() -> None:
    def function(x: Tensor) -> Tensor:
        base = x.abs()
        base.mul_(2.0)
        return (base.clone() + 1) * base

    assert check(function, X)[1].matched == 1


def test_a_copy_of_a_written_buffer_stays_and_the_write_too() -> None:
    cache = torch.zeros(4, 6)

    def function(x: Tensor) -> Tensor:
        old = cache * 1.0
        cache[1:3] = x
        return old + cache.sum()

    graph, report = check(function, X)
    assert "is written later" in the_reason(report)
    assert run(graph, X).written  # the buffer


def test_a_write_through_a_removed_view_is_kept() -> None:
    cache = torch.zeros(2, 6)

    def function(x: Tensor) -> Tensor:
        cache.view(2, 6).copy_(x)
        cache.contiguous().add_(1.0)
        return cache + x

    graph, report = check(function, X)
    assert report.matched == 2
    (written,) = run(graph, X).written.values()
    assert same_bits(written, X + 1.0)


def test_a_view_whose_shape_changes_in_place_stays() -> None:
    def function(x: Tensor) -> Tensor:
        base = x.abs()
        base.view(2, 6).t_()
        return base

    assert check(function, X)[1].matched == 0


RETURNED: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "a copy of an input": (lambda x: x * 1.0, 0),
    "a view of a copy of an input": (lambda x: (x * 1.0)[0], 0),
    "a copy of a copy of an input": (lambda x: x.clone().view(2, 6).clone(), 2),  # one copy must stay
    "a value and its copy": (lambda x: (lambda a: (a, a.clone()))(x.abs()), 0),
    "two copies of one value": (lambda x: (lambda a: (a.clone(), a * 1.0, a.neg()))(x.abs()), 1),
    "an input as it is": (lambda x: x.view(2, 6), 0),
    "a copy of a value": (lambda x: x.abs().clone(), 1),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", RETURNED)
def test_outputs_share_memory_with_nothing_they_did_not_share_it_with(case: str) -> None:
    function, removed = RETURNED[case]
    graph, report = check(lambda x: function(x), X)
    assert report.matched == removed
    values = graph.values({"x": X})
    before, after = trace(lambda x: function(x), {"x": X}).module(X), graph.module(*values)
    memory = [[t.untyped_storage().data_ptr() for t in (X, *outputs)] for outputs in (before, after)]
    shared = [[[a == b for a in places] for b in places] for places in memory]
    assert shared[0] == shared[1]


def test_symbolic_sizes_are_compared_without_guards() -> None:
    def function(x: Tensor) -> Tensor:
        return x.abs().reshape(-1, 6).neg()

    graph = trace(function, {"x": X.repeat(2, 1)}, dynamic={"x": [0]})
    guards = len(graph.shape_env.guards)
    (report,) = PassManager([REMOVE_NO_OPS], strict=True).run(graph.module)
    assert report.matched == 1 and len(graph.shape_env.guards) == guards
