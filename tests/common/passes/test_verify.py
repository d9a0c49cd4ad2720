"""core/common/passes/verify.py and regions.py: a wrong rewrite is found and placed, a right one passes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from core.common.config import Verify
from core.common.passes.context import PassContext
from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.manager import PassManager, PassReport
from core.common.passes.regions import find_regions, run_graph
from core.common.passes.rewrite import Finder, Site
from core.common.passes.snapshot import Snapshot
from core.common.passes.verify import Verification, checker, verify
from core.errors import PassError
from tests.common.passes.graphs import PUT, Stack, calls, find_add_rms, find_rms, fusion, rms, traced_graph
from tests.support import refused

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(9))


def rewritten(which: Pass, model: Callable[..., Any], *inputs: Tensor) -> tuple[PassReport, Any, Any, list[Any]]:
    """Run a pass and return its report, the graph before and after it, and the placeholders' values."""
    whole = traced_graph(model, *inputs)
    values = list(whole.values(dict(zip(["x", "y", "z"], inputs, strict=False))))
    before = Snapshot(whole.module)
    (report,) = PassManager([which], strict=True).run(whole.module)
    return report, before.module(), whole.module, values


def judged(which: Pass, model: Callable[..., Any], *inputs: Tensor, level: Verify = "full") -> Verification:
    report, before, after, values = rewritten(which, model, *inputs)
    assert report.matched > 0
    return verify(report, before, after, [values, values], level=level)


def wrong_at(site: str, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Finder:
    """Find norms as `find_rms` does, and get the arguments of one of them wrong."""

    def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        found = find_rms(context, node)
        here = isinstance(found, Site) and site in str(list(node.meta["nn_module_stack"].values())[-1][0])
        if not here or not isinstance(found, Site):
            return found
        return Site(anchor=found.anchor, target=found.target, args=change(found.args), interior=found.interior)

    return find


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("find", [find_rms, find_add_rms])
def test_a_right_rewrite_passes(dtype: torch.dtype, find: Finder) -> None:
    found = judged(fusion(find), Stack(2, size=64).to(dtype), X.to(dtype))
    assert found.passed and found.unjudged == "" and found.worst_ratio <= 1
    assert (found.num_inputs, found.num_sites) == (2, 5 if find is find_rms else 4)
    assert found.num_values >= 2 * (1 + found.num_sites)


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float32, lambda args: (args[0], args[1], 1e-3)),
        (torch.float32, lambda args: (args[0], args[1], 2e-5)),
        (torch.bfloat16, lambda args: (args[0], args[1], 0.1)),
    ],
)
def test_a_wrong_rewrite_is_found_and_placed(dtype: torch.dtype, change: Any) -> None:
    model = Stack(2, size=64).to(dtype)
    report, before, after, values = rewritten(fusion(wrong_at("layers.1.input", change)), model, (X / 8).to(dtype))
    found = verify(report, before, after, [values])
    assert not found.passed and found.worst_ratio > 1
    assert "layers.1.input_layernorm" in {f.where for f in found.findings}
    assert not {f.where for f in found.findings} - {"layers.1.input_layernorm", "output 0"}
    with refused(PassError, "verifying pass 'fuse_rms' of acme (5 sites)", "at layers.1.input_layernorm", "ratio"):
        checker([values], "full")(report, before, after)


def test_reordering_that_is_legitimate_passes() -> None:
    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not torch.sum:
            return None
        return Site(anchor=node, target=fx.symbolic_trace(halves), args=node.args[:1], interior=(node,))

    found = judged(fusion(find), lambda x: torch.sum(x, -1).exp(), X.repeat(4, 1) / 8)
    assert found.passed and found.num_sites == 1 and found.worst_ratio > 0


def halves(x: Tensor) -> Tensor:
    return x[:, :32].sum(-1) + x[:, 32:].sum(-1)


def cached(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return rms(x + KEPT[0], z, 1e-5) * 2 + _write(x)


KEPT = [torch.zeros(32, 64)]


def _write(x: Tensor) -> Tensor:
    KEPT[0].add_(x)
    return x


def loses_the_write(module: fx.GraphModule) -> int:
    (node,) = calls(module, "add_")
    module.graph.erase_node(node)
    return 1


def test_a_lost_write_is_found_and_nothing_is_written_here() -> None:
    whole = traced_graph(lambda x: cached(x, x, x[0]), X)
    values = list(whole.values({"x": X}))
    before = Snapshot(whole.module)

    def run(context: PassContext) -> PassResult:
        return PassResult(matched=loses_the_write(context.module), sites=("add_",))

    (report,) = PassManager([Pass(name="loses", run=run, owner="acme")]).run(whole.module)
    found = verify(report, before.module(), whole.module, [values])
    assert [f.where.partition(" ")[0] for f in found.findings] == ["input"]
    assert found.worst_ratio > 1
    assert KEPT[0].eq(0).all()
    kept = verify(report, before.module(), before.module(), [values])
    assert kept.passed and kept.num_values == 2 and KEPT[0].eq(0).all()


def test_the_sample_judges_a_third_of_the_sites_and_the_first_inputs() -> None:
    found = judged(fusion(find_rms), Stack(4, size=64), X, level="sample")
    assert (found.num_inputs, found.num_sites) == (1, 3)
    assert found.passed
    off = judged(fusion(find_rms), Stack(1, size=64), X, level="off")
    assert (off.num_inputs, off.num_values, off.passed) == (0, 0, True)


def test_the_manager_undoes_what_the_check_refuses(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(1, size=64)
    whole = traced_graph(model, X)
    values = list(whole.values({"x": X}))
    expected = whole.module(*values)[0]
    wrong = fusion(wrong_at("norm", lambda args: (args[0], args[1], 0.5)))
    (report,) = PassManager([wrong]).run(whole.module, check=checker([values], "full"))
    assert "verifying pass 'fuse_rms'" in report.error and report.matched == 0
    assert "pass undone" in caplog.text
    assert torch.equal(whole.module(*values)[0], expected)
    with pytest.raises(PassError, match="verifying pass"):
        PassManager([wrong], strict=True).run(whole.module, check=checker([values], "full"))


def test_integer_outputs_must_be_equal() -> None:
    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target != "argmax":
            return None
        return Site(anchor=node, target=torch.argmin, args=node.args, interior=(node,))

    found = judged(fusion(find), lambda x: x.argmax(-1), X)
    assert {f.ratio for f in found.findings} == {float("inf")} and "elements differ" in found.findings[0].reason


def test_small_outputs_have_a_bound_too() -> None:
    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target != "sum":
            return None
        return Site(anchor=node, target=torch.mul, args=(node.args[0], 1.01), interior=(node,))

    good = judged(fusion(tripled(3)), lambda x: x * 2 + x, X[0, :8])
    assert good.passed
    assert not judged(fusion(tripled(3.01)), lambda x: x * 2 + x, X[0, :8]).passed


def tripled(factor: float) -> Finder:
    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add:
            return None
        product: Any = node.args[0]
        return Site(anchor=node, target=torch.mul, args=(node.args[1], factor), interior=(product, node))

    return find


def test_what_has_no_fp64_form_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    def half_only(x: Tensor) -> Tensor:
        assert x.dtype != torch.float64, "no kernel for fp64"
        return x * 3

    module = fx.Graph()
    x = module.placeholder("x")
    module.output((module.call_function(half_only, (x,)),))
    graph = fx.GraphModule(torch.nn.Module(), module)
    report = rewritten(fusion(tripled(3)), lambda x: x * 2 + x, X)[0]
    found = verify(report, graph, graph, [[X]])
    assert found.passed and "no kernel for fp64" in found.unjudged and found.num_values == 0
    checker([[X]], "full")(report, graph, graph)
    assert "was not verified" in caplog.text


def test_regions_leave_out_what_writes() -> None:
    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add:
            return None
        (copy,) = calls(context.module, "index_copy_")
        cache, _, index, rows = copy.args
        (product,) = calls(context.module, operator.mul)
        return Site(anchor=node, target=tripled_put, args=(cache, index, rows), interior=(copy, product, node))

    def model(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        cache = x.clone()
        cache.index_copy_(0, y, z)
        return cache * 2 + cache

    report, before, after, values = rewritten(fusion(find), model, X, torch.tensor([1, 2]), torch.ones(2, 64))
    assert report.matched == 1 and find_regions("fuse_rms", before, after) == []
    found = verify(report, before, after, [values])
    assert found.passed and found.num_sites == 0 and found.num_values == 1


def tripled_put(cache: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    tripled: Tensor = PUT(cache, index, rows) * 3
    return tripled


def test_inputs_that_share_memory_still_do_in_a_run() -> None:
    graph = fx.symbolic_trace(lambda x, y: (x.add_(1), y * 1)[1])
    whole = torch.zeros(2, 4)
    result = run_graph(graph, [whole[0], whole])
    assert result.outputs[0][0].eq(1).all() and whole.eq(0).all()
    exact = run_graph(graph, [whole[0], whole], fp64=True)
    assert exact.outputs[0].dtype == torch.float64 and exact.outputs[0][0].eq(1).all() and whole.eq(0).all()
