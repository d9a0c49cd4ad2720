"""core/compilation/rewrite/manager.py: order, blame, promises, and what is reported."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass, PassTraits
from core.common.passes.pass_guards import Guards
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.sites import Site
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.order import order, predecessors
from core.device import Capabilities
from core.errors import PassError, UsageError
from tests.common.passes.graphs import Stack, find_rms, fusion, traced
from tests.support import refused, rewrite


def named(name: str, **fields: Any) -> Pass:
    return Pass(name=name, run=lambda context: PassResult(matched=0), owner=f"owner of {name}", **fields)


def names(*passes: Pass) -> list[str]:
    return [p.name for p in order(passes)]


def graph() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: (x + 1) * (x + 2))


def add_to_sub(module: fx.GraphModule) -> list[str]:
    """Replace `x + 1` by `x - (-1)`: additions of other constants are left alone."""
    adds = [n for n in module.graph.nodes if n.op == "call_function" and n.args[1:] == (1,)]
    for node in adds:
        node.target, node.args = torch.sub, (node.args[0], -1)
    return [node.name for node in adds]


def test_registration_order_stands_where_nothing_is_declared() -> None:
    assert names(named("c"), named("a"), named("b")) == ["c", "a", "b"]


def test_before_and_after_are_kept() -> None:
    assert names(named("a", after=("b",)), named("b")) == ["b", "a"]
    assert names(named("a"), named("b", before=("a",))) == ["b", "a"]
    chain = names(named("a", after=("b",)), named("b", after=("c",)), named("c"), named("d", before=("c",)))
    assert chain == ["d", "c", "b", "a"]


def test_absent_names_mean_nothing() -> None:
    assert names(named("a", after=("absent",), before=("gone",)), named("b")) == ["a", "b"]


def test_a_cycle_names_its_passes() -> None:
    with refused(PassError, "ordering the passes", "contradict", "drop one") as _:
        order([named("a", before=("b",)), named("b", before=("a",)), named("c")])
    with pytest.raises(PassError, match="a") as caught:
        order([named("a", before=("b",)), named("b", before=("a",)), named("c")])
    parts = set(caught.value.found.partition(": ")[2].split(" -> "))
    assert parts == {"'a' of owner of a", "'b' of owner of b"}


def test_the_model_runs_without_the_last_pass_of_a_cycle_unless_strict(caplog: pytest.LogCaptureFixture) -> None:
    one = rewrite(add_to_sub, name="one", after=("late",))
    passes = [one, named("c"), named("late", after=("one",))]
    with refused(PassError, "ordering the passes", "'one' of acme", "'late' of owner of late"):
        PassManager(passes, strict=True)
    module = graph()
    first, other, left = PassManager(passes).run(module)
    assert "the model runs without pass 'late' of owner of late" in caplog.text
    assert [(r.name, r.matched) for r in (first, other)] == [("one", 1), ("c", 0)]
    assert (left.name, left.matched) == ("late", 0) and "contradict each other" in left.error
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 6.0))


def test_one_name_twice_names_both_owners() -> None:
    twin = Pass(name="a", run=lambda context: PassResult(matched=0), owner="acme 2.0")
    with refused(PassError, "pass 'a' of acme 2.0", "owner of a registers", "rename one"):
        PassManager([named("a"), twin])


def test_a_pass_rewrites_in_place_and_is_reported() -> None:
    module = graph()
    x = torch.linspace(-2, 2, 9)
    before = module(x)
    (report,) = PassManager([rewrite(add_to_sub, misses=("add_1",), expect=1)]).run(module)
    assert (report.name, report.owner, report.matched, report.expected) == ("acme_pass", "acme", 1, 1)
    assert report.sites == ("add",)
    assert report.near_misses == (NearMiss(site="add_1", reason="the constant is no 1"),)
    assert report.elapsed_ms > 0
    assert [n.target for n in module.graph.nodes if n.op == "call_function"].count(torch.sub) == 1
    assert torch.equal(module(x), before)
    json.dumps(report.to_json())


def test_the_code_is_regenerated_after_a_pass() -> None:
    def double(module: fx.GraphModule) -> list[str]:
        (node,) = [n for n in module.graph.nodes if n.args[1:] == (2,)]
        node.args = (node.args[0], 4)
        return [node.name]

    module = graph()
    PassManager([rewrite(double)]).run(module)
    assert module(torch.ones(1)).item() == 10


def test_passes_run_in_their_order_each_on_the_result_of_the_last() -> None:
    seen: list[str] = []
    passes = [
        rewrite(lambda g: seen.append("second") or add_to_sub(g), name="second", after=("first",)),  # type: ignore[func-returns-value]
        rewrite(lambda g: seen.append("first") or add_to_sub(g), name="first"),  # type: ignore[func-returns-value]
    ]
    reports = PassManager(passes).run(graph())
    assert seen == ["first", "second"]
    assert [(r.name, r.matched) for r in reports] == [("first", 1), ("second", 0)]


def test_another_stage_runs_nothing() -> None:
    assert PassManager([rewrite(add_to_sub)]).run(graph(), "aten") == ()


def fails(module: fx.GraphModule) -> list[str]:
    add_to_sub(module)
    raise KeyError("val")


def breaks(module: fx.GraphModule) -> list[str]:
    first, *_, last = [n for n in module.graph.nodes if n.op == "call_function"]
    first.args = (last, 1)  # used before it is computed
    return [first.name]


def adds_an_input(module: fx.GraphModule) -> list[str]:
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.placeholder("y")
    return ["y"]


def drops_a_module(module: fx.GraphModule) -> list[str]:
    module.delete_all_unused_submodules()
    del module.scale
    raise KeyError("val")


BROKEN = [
    (fails, "KeyError: 'val'"),
    (breaks, "used before it has been defined"),
    (adds_an_input, "changed the graph's placeholders or the number of its outputs"),
]


@pytest.mark.parametrize(("change", "found"), BROKEN)
def test_a_failing_pass_is_blamed_when_strict(change: Any, found: str) -> None:
    phrases = ("running pass 'acme_pass' of acme", found, "passes without 'acme_pass'", "report it to acme")
    with refused(PassError, *phrases):
        PassManager([rewrite(change)], strict=True).run(graph())


@pytest.mark.parametrize(("change", "found"), BROKEN)
def test_a_failing_pass_is_undone_and_the_others_run(change: Any, found: str, caplog: pytest.LogCaptureFixture) -> None:
    module = graph()
    x = torch.linspace(-2, 2, 9)
    before, text = module(x), str(module.graph)
    manager = PassManager([rewrite(change, name="first"), rewrite(add_to_sub, name="last", expect=1)])
    first, last = manager.run(module)
    assert found in first.error and (first.matched, first.sites) == (0, ())
    assert (last.matched, last.error) == (1, "")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "running pass 'first' of acme" in warning and "pass undone" in warning
    assert torch.equal(module(x), before)
    PassManager([rewrite(change)]).run(other := graph())
    assert str(other.graph) == text and torch.equal(other(x), before)
    json.dumps(first.to_json())


def test_what_a_failing_pass_removed_from_the_module_comes_back() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(3.0))
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = self.linear(x) * self.scale
            return scaled

    module = fx.symbolic_trace(Scaled())
    before = module(torch.ones(2))
    PassManager([rewrite(drops_a_module)]).run(module)
    assert torch.equal(module(torch.ones(2)), before)


@pytest.mark.parametrize("result", [None, 3, ("a",)])
def test_a_pass_that_returns_no_result_is_blamed(result: Any) -> None:
    with refused(PassError, "running pass 'a'", repr(result), "not a PassResult"):
        PassManager([Pass(name="a", run=lambda context: result)], strict=True).run(graph())


def test_a_broken_promise_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "core.passes"):
        (report,) = PassManager([rewrite(add_to_sub, misses=("add_1",), expect=2)]).run(graph())
    assert (report.matched, report.expected) == (1, 2)
    warning = next(r for r in caplog.records if r.levelno == logging.WARNING).getMessage()
    assert "owes 2 matches" in warning and "it matched 1 (add_1: the constant is no 1)" in warning
    assert "acme_pass: 1 of 2 owed matched, 1 near-misses in" in caplog.text


def test_a_broken_promise_is_an_error_when_strict() -> None:
    manager = PassManager([rewrite(add_to_sub, expect=2)], strict=True)
    with refused(PassError, "'acme_pass' of acme", "owes 2", "matched 1 (no near-miss reported)", "without strict"):
        manager.run(graph())


def test_a_kept_promise_and_no_promise_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    passes = [rewrite(add_to_sub, expect=1), rewrite(add_to_sub, name="other")]
    PassManager(passes, strict=True).run(graph())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_sites_left_for_lack_of_an_answer_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """No model is to blame for them, so nobody looks for them among the near-misses: norms were lost so unnoticed."""
    misses = tuple(
        NearMiss(site=f"layers.{i}.norm", reason="the new op asks about a symbolic size: Ne(s32, 1)", node="n")
        for i in range(2)
    )
    PassManager([Pass(name="a", run=lambda context: PassResult(matched=0, near_misses=misses))]).run(graph())
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "left 2 sites" in warning and "layers.0.norm: the new op asks about a symbolic size" in warning


def test_what_is_promised_may_depend_on_the_graph() -> None:
    def owed(context: PassContext) -> int | None:
        return len([node for node in context.graph.nodes if node.args[1:] == (1,)])

    (report,) = PassManager([rewrite(add_to_sub, expect=owed)], strict=True).run(graph())
    assert (report.expected, report.matched) == (1, 1)
    with refused(PassError, "owes 1", "matched 0"):
        PassManager([rewrite(lambda module: [], expect=owed)], strict=True).run(graph())


def test_a_guarded_pass_is_skipped_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    guarded = rewrite(add_to_sub, expect=1, guards=Guards(world_size=(2, None), tokens=(1, 8)))
    with caplog.at_level(logging.DEBUG, "core.passes"):
        (report,) = PassManager([guarded], strict=True).run(graph())
    assert (report.skipped[:29], report.matched, report.expected) == ("it is for 2 or more processes", 0, None)
    assert f"acme_pass: skipped, {report.skipped}" in caplog.text
    (ran,) = PassManager([guarded], strict=True, world_size=2).run(graph(), tokens=(1, 8))
    assert (ran.skipped, ran.matched) == ("", 1)


def test_passes_run_as_registered_unless_declared_otherwise() -> None:
    registered = [named("lift"), named("merge", after=("late",)), named("clean"), named("late"), named("device")]
    assert names(*registered) == ["lift", "clean", "late", "merge", "device"]


def test_what_a_device_finds_unprofitable_is_skipped_with_its_reason_unless_asked_for() -> None:
    capable = Capabilities(device_name="A", dtypes=frozenset(), unprofitable={"a": "slower here"})
    passes = (named("a"), named("b"))
    assert [r.skipped for r in PassManager(passes, capabilities=capable).run(graph())] == ["slower here", ""]
    for asked in ({"enable": ("a",)}, {"only": ("a", "b")}):
        assert [r.skipped for r in PassManager(passes, capabilities=capable, **asked).run(graph())] == ["", ""]


def test_capabilities_and_parameters_reach_the_pass() -> None:
    capable = Capabilities(device_name="x", dtypes=frozenset(), extra={"fused": True})
    seen: list[PassContext] = []

    def run(context: PassContext) -> PassResult:
        seen.append(context)
        return PassResult(matched=len(seen) - 1)

    declared = Pass(name="a", run=run, params={"width": 4}, owner="acme", guards=Guards(capabilities={"fused": True}))
    manager = PassManager([declared], capabilities=capable)
    (nothing,), (report,) = (manager.run(graph(), tokens=(2, 5)) for _ in range(2))
    (_, context) = seen
    assert (context.name, context.owner, context.params["width"], context.tokens) == ("a", "acme", 4, (2, 5))
    assert context.capabilities is capable and (nothing.uuid, report.uuid) == ("", declared.uuid())


def test_passes_may_be_chosen_and_disabled() -> None:
    three = [named("a"), named("b"), named("c")]
    assert [p.name for p in PassManager(three, only=("c", "a")).passes] == ["a", "c"]
    assert [p.name for p in PassManager(three, disable=("a",)).passes] == ["b", "c"]
    with refused(UsageError, "choosing pass 'fuse_rns'", "fuse_rms", "did you mean 'fuse_rms'?"):
        PassManager([named("fuse_rms")], only=("fuse_rns",))
    with refused(UsageError, "choosing pass 'x'", "none"):
        PassManager([], disable=("x",))
    assert len(set(PassManager(three).uuids())) == 3 and PassManager(three).uuids("aten") == ()


def test_a_pass_may_build_only_on_those_it_is_ordered_after() -> None:
    direct = predecessors(order([named("c", after=("b",)), named("b"), named("a", before=("b",))]))
    assert direct == {"a": frozenset(), "b": {"a"}, "c": {"a", "b"}}


def test_dead_code_goes_after_a_pass_but_no_write() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        rows = x * 1
        rows.add_(1)
        rows.index_copy_(0, torch.tensor([0]), torch.tensor([2.0]))
        return rows + 1

    module = fx.symbolic_trace(model)

    def leave_behind(module: fx.GraphModule) -> list[str]:
        with module.graph.inserting_before(module.graph.output_node()):
            module.graph.call_function(torch.sin, (next(iter(module.graph.nodes)),))
        return ["x"]

    before = module(torch.ones(3))
    PassManager([rewrite(leave_behind)], strict=True).run(module)
    targets = [node.target for node in module.graph.nodes]
    assert torch.sin not in targets and {"add_", "index_copy_"} <= set(targets)
    assert torch.equal(module(torch.ones(3)), before)


def test_analyses_live_until_a_pass_that_changes_the_graph() -> None:
    counts: list[int] = []

    def asks(context: PassContext) -> PassResult:
        context.analysis("writes")
        assert context.analyses is not None
        counts.append(context.analyses.num_computed)
        return PassResult(matched=0)

    def changes(context: PassContext) -> PassResult:
        return PassResult(matched=len(add_to_sub(context.module)))

    asking = [Pass(name=name, run=asks) for name in ("a", "b", "c")]
    PassManager([asking[0], asking[1], Pass(name="x", run=changes), asking[2]]).run(graph())
    assert counts == [1, 1, 2]
    counts.clear()
    keeps = Pass(
        name="x", run=changes, traits=PassTraits(preserves=frozenset({"writes"}), requires=frozenset({"writes"}))
    )
    PassManager([asking[0], keeps, asking[2]]).run(graph())
    assert counts == [1, 1]
    with refused(UsageError, "analyses ['colour'] for pass 'a' of owner of a"):
        PassManager([named("a", traits=PassTraits(requires=frozenset({"colour"})))])


def test_two_passes_that_claim_one_node_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(4, 16)

    def first(context: PassContext, node: fx.Node) -> Site | None:
        return Site(anchor=node, target=torch.cos, args=node.args, interior=(node,)) if node.target == "sin" else None

    def second(context: PassContext, node: fx.Node) -> Site | None:
        return (
            Site(anchor=node, target=torch.exp, args=node.args, interior=(node,)) if node.target is torch.cos else None
        )

    both = [fusion(first, name="first", owner="acme 1.0"), fusion(second, name="second", owner="other 2.0")]
    reports = PassManager(both).run(traced(lambda x: x.sin() + 1, x))
    assert [r.matched for r in reports] == [1, 0]
    assert "pass 'second' of other 2.0" in caplog.text and "which pass 'first' of acme 1.0 made" in caplog.text
    with refused(PassError, "pass 'second' of other 2.0", "'first' of acme 1.0 made", "comes after"):
        PassManager(both, strict=True).run(traced(lambda x: x.sin() + 1, x))
    both[1] = fusion(second, name="second", after=("first",))
    assert [r.matched for r in PassManager(both, strict=True).run(traced(lambda x: x.sin() + 1, x))] == [1, 1]


def test_a_promise_broken_by_an_unsafe_site_names_it() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        for norm in (model_norm, model_norm):
            x = norm(x)
        return x

    model_norm = Stack(1).norm
    module = traced(model, torch.ones(4, 16))
    with refused(PassError, "owes 3 matches", "matched 2"):
        PassManager([fusion(find_rms, expect=3)], strict=True).run(module)


def test_graphs_are_dumped_before_and_after(tmp_path: Path) -> None:
    module = traced(Stack(1), torch.ones(4, 16))
    manager = PassManager([fusion(find_rms, expect=3), named("idle")], dump_dir=tmp_path / "dumps")
    manager.run(module)
    names = sorted(path.name for path in (tmp_path / "dumps").iterdir())
    assert names == ["00-torch-00-fuse_rms.after.txt", "00-torch-00-fuse_rms.before.txt"]
    before, after = (tmp_path / "dumps" / names[1]).read_text(), (tmp_path / "dumps" / names[0]).read_text()
    assert "rsqrt" in before and "rsqrt" not in after
    line = next(line for line in after.splitlines() if "passes_test.rms" in line)
    assert ": float32[4, 16] = passes_test.rms.default(" in line and line.endswith("# layers.0.input_layernorm")


@pytest.mark.parametrize("strict", [True, False])
def test_an_unchanged_graph_is_not_touched(strict: bool) -> None:
    module = graph()
    nodes = list(module.graph.nodes)
    PassManager([named("a"), named("b")], strict=strict).run(module)
    assert list(module.graph.nodes) == nodes
