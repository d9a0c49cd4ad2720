"""tools/lift_coverage/match.py: which sites a rewritten graph covers, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.common.ops.norm.norms import RMS_NORM
from core.common.passes.declaration import Pass
from core.common.passes.norm.rms_norm import LIFT_RMS_NORM
from core.common.passes.results import NearMiss, PassResult
from core.compilation.rewrite.mechanisms import apply_pass
from core.compilation.rewrite.pass_report import PassReport
from core.engine.static.cache import CachedPhase
from lift_coverage.match import match_sites
from lift_coverage.measure import Coverage, measure
from lift_coverage.oracle import Site, find_sites


class ToyRMSNorm(nn.Module):
    def __init__(self, *, shown: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.shown = shown

    def forward(self, x: Tensor) -> Tensor:
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = self.weight * (x * root)
        # A second use of the root: no pass may take it away.
        return y + root if self.shown else y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shown = ToyRMSNorm(), ToyRMSNorm(), ToyRMSNorm(shown=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.shown(x)


def run(*passes: Pass, sites: Sequence[Site] | None = None) -> Coverage:
    model = Model()
    phase = CachedPhase(name="prefill", function=lambda x: model(x), inputs={"x": torch.randn(16, 8)})
    found = find_sites(model, phase.function, phase.inputs) if sites is None else sites
    return measure(found, phase, passes)


def test_each_lifted_site_is_counted_once_and_the_other_has_its_reason() -> None:
    found = run(LIFT_RMS_NORM)
    assert (found.num_sites["rms_norm"], found.num_lifted["rms_norm"]) == (3, 2)
    (miss,) = found.missed
    assert miss.site.path == "shown"
    assert miss.reason.startswith("lift_rms_norm: ")
    assert miss.node
    assert not (found.extra or found.disagreements or found.errors)
    assert found.judged.equal
    assert any(signature.startswith("core::rms_norm(") for signature in found.signatures)


def test_without_passes_nothing_is_lifted() -> None:
    found = run()
    assert found.num_lifted["rms_norm"] == 0
    assert {miss.reason for miss in found.missed} == {"no candidate recognised"}


def test_an_op_at_no_site_is_extra_and_covers_nothing() -> None:
    elsewhere = Site("rms_norm", "third", "ToyRMSNorm")
    found = run(LIFT_RMS_NORM, sites=[elsewhere])
    assert found.num_lifted["rms_norm"] == 0
    assert found.extra == ("rms_norm at first", "rms_norm at second")
    assert found.disagreements == ("rms_norm at third: 1 calls in the eager run, 0 in the trace",)


def test_a_site_takes_no_more_than_one_op_and_none_of_another_kind() -> None:
    twice = [Site("rms_norm", "first", "ToyRMSNorm"), Site("rms_norm", "first", "ToyRMSNorm")]
    other = Site("layer_norm", "second", "ToyRMSNorm")
    found = run(LIFT_RMS_NORM, sites=[*twice, other])
    assert (found.num_lifted["rms_norm"], found.num_lifted["layer_norm"]) == (1, 0)
    assert "rms_norm at first: 2 calls in the eager run, 1 in the trace" in found.disagreements


def test_a_site_that_owes_two_ops_is_not_lifted_by_one() -> None:
    found = run(LIFT_RMS_NORM, sites=[Site("rms_norm", "first", "ToyRMSNorm", parts=2)])
    assert found.num_lifted["rms_norm"] == 0


def wrong(change: Callable[[Any], None]) -> Pass:
    """Return the lifting of norms with something changed in each op that it makes."""

    def lift(context: Any) -> PassResult:
        result = apply_pass(LIFT_RMS_NORM, context)
        for node in context.graph.find_nodes(op="call_function", target=RMS_NORM.overload):
            change(node)
        return result

    return Pass(name="lift_wrong", run=lift)


def test_a_wrong_rewrite_fails_the_criterion() -> None:
    def other_eps(node: Any) -> None:
        node.args = (*node.args[:2], 1e-3)

    found = run(wrong(other_eps))
    assert found.num_lifted["rms_norm"] == 2
    assert not found.judged.passed
    assert found.judged.ratio > 1
    assert "output 0" in found.judged.reason


def test_a_pass_that_was_undone_is_an_error_and_lifts_nothing() -> None:
    def fails(node: Any) -> None:
        raise ValueError("a fault")

    found = run(wrong(fails))
    (error,) = found.errors
    assert "a fault" in error
    assert found.num_lifted["rms_norm"] == 0


def report(name: str, *misses: NearMiss) -> PassReport:
    return PassReport(
        name=name, owner="core", stage="torch", matched=0, expected=None, elapsed_ms=0, sites=(), near_misses=misses
    )


@pytest.mark.parametrize(
    ("kind", "pass_name", "told"),
    [
        ("rms_norm", "lift_rms_norm", True),
        ("attention", "lift_attention", True),
        ("add_rms_norm", "fuse_add_rms_norm", True),
        ("rms_norm", "lift_rotary", False),
    ],
)
def test_the_reason_is_that_of_a_pass_for_the_kind(kind: str, pass_name: str, told: bool) -> None:
    graph = torch.fx.symbolic_trace(nn.Identity())
    misses = (NearMiss(site="layers.1.x", reason="another", node="b"), NearMiss(site="layers.0.x", reason="this"))
    (missed,), _ = match_sites([Site(kind, "layers.0.x", "X")], graph, [report(pass_name, *misses)])
    assert missed.reason == (f"{pass_name}: this" if told else "no candidate recognised")
