"""core/verify/verify.py and regions.py: a wrong rewrite is found and placed, a right one passes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import linear

from core.common.passes.constants import Constants
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.sites import MADE_BY, Finder, Made, Site
from core.compilation.options import Verify
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.trace.tracing import trace
from core.errors import PassError
from core.verify.regions import find_regions
from core.verify.verify import Verification, checker, verify
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


@pytest.mark.cases(2)
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


@pytest.mark.slow
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
    after = fx.symbolic_trace(lambda x: x * 3.0000002)
    report = rewritten(fusion(tripled(3)), lambda x: x * 2 + x, X)[0]
    found = verify(report, graph, after, [[X]])
    # What is equal bit by bit needs no reference: an input that the unknown function may have written.
    assert found.passed and "no kernel for fp64" in found.unjudged and found.num_values == 1
    checker([[X]], "full")(report, graph, after)
    assert "was not verified" in caplog.text
    same = verify(report, graph, graph, [[X]])
    assert same.passed and same.unjudged == "" and same.num_values == 2


def cache_fusion(target: Callable[..., Tensor]) -> Finder:
    """Find a write into a cache and what is computed of it, and offer to make it one call."""

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add:
            return None
        (copy,) = calls(context.module, "index_copy_")
        cache, _, index, rows = copy.args
        (product,) = calls(context.module, operator.mul)
        return Site(anchor=node, target=target, args=(cache, index, rows), interior=(copy, product, node))

    return find


def writes(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    cache = x.clone()
    cache.index_copy_(0, y, z)
    return cache * 2 + cache


WRITTEN = (X, torch.tensor([1, 2]), torch.ones(2, 64))


def test_a_site_that_writes_is_judged_apart_with_what_it_writes() -> None:
    report, before, after, values = rewritten(fusion(cache_fusion(tripled_put)), writes, *WRITTEN)
    (region,) = find_regions("fuse_rms", before, after)
    # The result of index_copy_ is not used, but it is what the new op does.
    assert [node.target for node in region.before.graph.nodes if node.op == "call_method"] == ["index_copy_"]
    assert region.start == "index_copy_" and region.changing == {"cache"}
    found = verify(report, before, after, [values])
    assert found.passed and (found.num_sites, found.num_whole) == (1, 0) and found.num_values >= 3


@pytest.mark.parametrize(
    "wrong", [lambda cache, index, rows: PUT(cache.clone(), index, rows) * 3, "rows"], ids=["scaled copy", "rows"]
)
def test_a_wrong_write_is_found_at_its_site(wrong: Any) -> None:
    def doubled_rows(cache: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        result: Tensor = PUT(cache, index, rows) * 3
        cache.mul_(2)
        return result

    def forgetful(cache: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        return wrong(cache, index, rows)  # type: ignore[no-any-return]  # a parameter

    target = doubled_rows if wrong == "rows" else forgetful
    report, before, after, values = rewritten(fusion(cache_fusion(target)), writes, *WRITTEN)
    found = verify(report, before, after, [values])
    assert found.fault is not None and found.fault.where == "add" == report.sites[0] and found.fault.node


def test_a_site_between_whose_nodes_something_else_writes_is_judged_by_the_whole() -> None:
    def disturbed(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        cache = x.clone()
        product = cache * 2
        cache.index_copy_(0, y, z)
        return product + cache

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add:
            return None
        return Site(anchor=node, target=torch.add, args=node.args[:1] + node.args[1:], interior=(node,))

    report, before, after, values = rewritten(fusion(find), disturbed, *WRITTEN)
    (region,) = find_regions("fuse_rms", before, after)
    assert [node.op for node in region.before.graph.nodes].count("call_function") == 1
    wide = after.graph.find_nodes(op="call_function", target=torch.add)[0]
    wide.args = (wide.args[1], wide.args[1])
    # Now the replaced part would reach back over the write.
    assert find_regions("fuse_rms", before, after) == []
    found = verify(report, before, after, [values])
    assert (found.num_sites, found.num_whole) == (0, 1)
    assert found.fault is not None and found.fault.node == wide.name and "here the graphs part" in found.fault.reason


def test_the_first_value_that_differs_is_named_where_no_site_is() -> None:
    model = Stack(2, size=64)
    whole = traced_graph(model, X / 8)
    values = list(whole.values({"x": X / 8}))
    before = Snapshot(whole.module).module()
    roots = whole.module.graph.find_nodes(op="call_function", target=torch.rsqrt)
    added = roots[2].args[0]
    added.replace_all_uses_with(added.args[0])
    whole.module.graph.erase_node(added)
    found = verify(report_of("remove_eps", matched=1), before, whole.module, [values])
    assert found.fault is not None and (found.fault.node, found.fault.where) == (
        roots[2].name,
        "layers.1.input_layernorm",
    )
    assert found.findings[0].where == "output 0" and found.num_whole == 1


def report_of(name: str, matched: int = 0) -> PassReport:
    return PassReport(
        name=name, owner="acme", stage="torch", matched=matched, expected=None, elapsed_ms=0.0, sites=(), near_misses=()
    )


def test_a_graph_that_no_longer_runs_is_a_finding() -> None:
    before = fx.symbolic_trace(lambda x: x.reshape(-1) + 1)
    after = fx.symbolic_trace(lambda x: x.reshape(7) + 1)
    found = verify(report_of("reshapes", 1), before, after, [[X]])
    assert found.fault is not None and "it can't be run: RuntimeError" in found.fault.reason


def test_a_write_into_what_was_only_read_is_a_finding() -> None:
    before, after = fx.symbolic_trace(lambda x: x + 1), fx.symbolic_trace(lambda x: x.add_(1) + 0)
    found = verify(report_of("in_place", 1), before, after, [[X.clone()]])
    assert [finding.where for finding in found.findings][:1] == ["input x"]


def test_constants_that_a_pass_added_are_bound_by_name() -> None:
    """Two linears of one input become one over their joined weights: a placeholder that the graph before lacks."""
    weights = [torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]

    def model(x: Tensor) -> Tensor:
        return linear(x, weights[0]) * linear(x, weights[1])

    for wrong in (False, True):
        whole = traced_graph(model, X)
        values = whole.values({"x": X})
        constants = Constants({})

        def run(context: PassContext, wrong: bool = wrong) -> PassResult:
            first, second = (node for node in context.graph.nodes if node.target is linear)
            assert context.constants is not None
            joined = context.constants.add(context.graph, "joined", torch.cat(weights), first)
            with context.graph.inserting_before(first):
                both = context.graph.call_function(linear, (first.args[0], joined))
                parts = context.graph.call_function(torch.chunk, (both, 2, -1))
            for index, old in enumerate((first, second)):
                with context.graph.inserting_before(old):
                    place = 0 if wrong else index
                    new = context.graph.call_function(operator.getitem, (parts, place))
                made = Made(pass_name=context.name, owner="acme", site="linears", replaced=(old.name,))
                new.meta[MADE_BY] = made
                old.replace_all_uses_with(new)
                context.graph.erase_node(old)
            return PassResult(matched=1, sites=("linears",))

        seen: list[Verification] = []
        PassManager([Pass(name="merge", run=run, owner="acme"), fusion(tripled(3))], strict=True).run(
            whole.module,
            constants=constants,
            check=lambda *args: seen.append(verify(*args, [values], constants=constants)),  # noqa: B023  # called at once
        )
        (found,) = seen
        assert found.passed is not wrong and found.num_sites == 1
        assert not wrong or (found.fault is not None and found.fault.where == "linears")


def test_symbolic_sizes_are_values_like_others() -> None:
    whole = trace(lambda x: (x * x.shape[0] + x).sum(-1), {"x": X}, dynamic={"x": (0,)})
    values = [whole.values({"x": x}) for x in (X, X[:9])]
    before = Snapshot(whole.module).module()

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add:
            return None
        product, x = node.args
        return Site(anchor=node, target=torch.add, args=(x, product), interior=(node,))

    (report,) = PassManager([fusion(find)]).run(whole.module)
    found = verify(report, before, whole.module, values)
    assert found.passed and (found.num_inputs, found.num_sites) == (2, 1)


def tripled_put(cache: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    tripled: Tensor = PUT(cache, index, rows) * 3
    return tripled
