"""core/common/passes/manager.py: order, blame, promises, and what is reported."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import fx

from core.common.passes.declaration import NearMiss, Pass, PassResult
from core.common.passes.manager import PassManager, order
from core.errors import PassError
from tests.support import refused, rewrite


def named(name: str, **fields: Any) -> Pass:
    return Pass(name=name, run=lambda graph: PassResult(matched=0), owner=f"owner of {name}", **fields)


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
    assert set(caught.value.found.partition(": ")[2].split(" -> ")) == {"a", "b"}


def test_one_name_twice_names_both_owners() -> None:
    twin = Pass(name="a", run=lambda graph: PassResult(matched=0), owner="acme 2.0")
    with refused(PassError, "pass 'a' of acme 2.0", "owner of a registers", "rename one"):
        PassManager([named("a"), twin])


@pytest.mark.parametrize("fields", [{"mechanism": "inductor", "stage": "aten"}, {"mechanism": "replace_pattern"}])
def test_a_mechanism_that_this_version_lacks_is_refused(fields: dict[str, Any]) -> None:
    with refused(PassError, "pass 'a'", f"{fields['mechanism']!r}", "mechanism 'graph' at stage 'torch' only"):
        PassManager([named("a", **fields)])


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


def test_a_raising_pass_is_blamed() -> None:
    def fails(module: fx.GraphModule) -> list[str]:
        raise KeyError("val")

    phrases = ("running pass 'acme_pass' of acme", "KeyError: 'val'", "passes without 'acme_pass'", "report it to acme")
    with refused(PassError, *phrases):
        PassManager([rewrite(fails)]).run(graph())


def test_an_invalid_graph_is_blamed_on_the_pass() -> None:
    def breaks(module: fx.GraphModule) -> list[str]:
        first, *_, last = [n for n in module.graph.nodes if n.op == "call_function"]
        first.args = (last, 1)  # used before it is computed
        return [first.name]

    with refused(PassError, "running pass 'acme_pass' of acme", "used before it has been defined"):
        PassManager([rewrite(breaks)]).run(graph())


@pytest.mark.parametrize("result", [None, 3, ("a",)])
def test_a_pass_that_returns_no_result_is_blamed(result: Any) -> None:
    with refused(PassError, "running pass 'a'", repr(result), "not a PassResult"):
        PassManager([Pass(name="a", run=lambda graph: result)]).run(graph())


def test_a_broken_promise_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "core.passes"):
        (report,) = PassManager([rewrite(add_to_sub, misses=("add_1",), expect=2)]).run(graph())
    assert (report.matched, report.expected) == (1, 2)
    warning = next(r for r in caplog.records if r.levelno == logging.WARNING).getMessage()
    assert "owes 2 matches" in warning and "it matched 1 (add_1: the constant is no 1)" in warning
    assert "acme_pass: 1 matched in" in caplog.text


def test_a_broken_promise_is_an_error_when_strict() -> None:
    manager = PassManager([rewrite(add_to_sub, expect=2)], strict=True)
    with refused(PassError, "'acme_pass' of acme", "owes 2", "matched 1 (no near-miss reported)", "without strict"):
        manager.run(graph())


def test_a_kept_promise_and_no_promise_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    passes = [rewrite(add_to_sub, expect=1), rewrite(add_to_sub, name="other")]
    PassManager(passes, strict=True).run(graph())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
