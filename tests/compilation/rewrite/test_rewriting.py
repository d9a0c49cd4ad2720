"""core/compilation/rewriting.py through core.compile: which passes run, what a wrong one leads to, verification, and
ATen.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core import InputSpec, Program
from core.common.graphs.backend import BoundCallable, CallBackend, GraphKey
from core.common.ops.implementation import OpImplementation
from core.common.ops.norm.norms import RMS_NORM
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass, PassTraits
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.standard import COMMON_PASSES
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewriting import device_passes
from core.errors import PassError, UsageError
from tests.support import compile_with, cpu, refused, rewrite

ROWS = {"x": InputSpec(("n", 2), torch.float32)}
X = torch.arange(1.0, 7).view(3, 2)


def model(x: Tensor) -> Tensor:
    return (x + 1) * (x + 2)


def compiled(device: Mapping[str, Any] | None = None, **options: Any) -> Program:
    options = {"inputs": ROWS, "buckets": [4, 8], "lowering": "inline"} | options
    return compile_with(options.pop("model", model), cpu(**device or {}), **options)


def adds_of_one(graph: fx.GraphModule) -> list[str]:
    """Replace `x + 1` by `x - (-1)`; other constants are near-misses."""
    adds = [n for n in graph.graph.nodes if n.target is operator.add and n.args[1] == 1]
    for node in adds:
        node.target, node.args = operator.sub, (node.args[0], -1)
    return [node.name for node in adds]


FUSE = rewrite(adds_of_one, misses=("add_1",), expect=1)


def test_a_pass_runs_and_keeps_the_numbers() -> None:
    plain, fused = compiled(), compiled({"passes": (FUSE,)})
    assert torch.equal(fused(x=X), plain(x=X))
    (trace,) = fused.report().traces
    (report,) = own(trace.passes)
    assert (report.name, report.owner, report.matched, report.sites) == ("acme_pass", "acme", 1, ("add",))
    assert report.near_misses == (NearMiss(site="add_1", reason="the constant is no 1"),)
    assert own(plain.report().traces[0].passes) == []


def own(reports: Iterable[PassReport]) -> list[PassReport]:
    """Return the reports of passes that tests bring, neither core's own nor the device's."""
    return [report for report in reports if report.owner not in ("core", "core_cpu")]


def test_a_pass_changes_what_runs() -> None:
    def wrong(graph: fx.GraphModule) -> list[str]:
        return [node.name for node in graph.graph.nodes if node.target is operator.add and not node.update_arg(1, 5)]

    assert torch.equal(compiled({"passes": (rewrite(wrong),)})(x=X), (X + 5) * (X + 5))


@pytest.mark.slow
def test_passes_are_chosen_by_name() -> None:
    device = {"passes": (FUSE, rewrite(lambda graph: [], name="other"))}
    names = {
        chosen: [p.name for p in compiled(device, passes=chosen).report().traces[0].passes]
        for chosen in (None, (), ("other",), ("other", "acme_pass"))
    }
    common = [declared.name for declared in COMMON_PASSES if not declared.traits.closes]
    assert sorted(names.pop(None)) == sorted([*common, "acme_pass", "other"])
    assert names == {(): [], ("other",): ["other"], ("other", "acme_pass"): ["acme_pass", "other"]}
    kept = compiled(device, disable_passes=(*common, "other")).report().traces[0].passes
    assert [p.name for p in kept] == ["acme_pass"]
    with refused(UsageError, "choosing pass 'othr'", "did you mean 'other'"):
        compiled(device, passes=("othr",))


def test_a_pass_sees_every_trace() -> None:
    buckets = {"decode": [1, 4], "prefill": [8]}
    report = compiled({"passes": (FUSE,)}, buckets=buckets).report()
    assert [[p.matched for p in own(trace.passes)] for trace in report.traces] == [[1], [1]]


def test_a_broken_promise(caplog: pytest.LogCaptureFixture) -> None:
    device = {"passes": (rewrite(adds_of_one, misses=("add_1",), expect=2),)}
    with caplog.at_level(logging.WARNING, "core.passes"):
        assert torch.equal(compiled(device)(x=X), model(X))
    assert "owes 2 matches" in caplog.text
    with refused(PassError, "'acme_pass' of acme", "owes 2", "matched 1 (add_1: the constant is no 1)", "near-misses"):
        compiled(device, strict=True)


def test_a_raising_pass_and_an_invalid_graph_are_blamed() -> None:
    def fails(context: PassContext) -> PassResult:
        raise ZeroDivisionError("by zero")

    def breaks(graph: fx.GraphModule) -> list[str]:
        first, *_, last = [n for n in graph.graph.nodes if n.op == "call_function"]
        first.args = (last, 1)
        return []

    with refused(PassError, "running pass 'bad' of acme", "ZeroDivisionError: by zero", "report it to acme"):
        compiled({"passes": (Pass(name="bad", run=fails, owner="acme"),)}, strict=True)
    with refused(PassError, "running pass 'acme_pass' of acme", "used before it has been defined"):
        compiled({"passes": (rewrite(breaks),)}, strict=True)
    program = compiled({"passes": (Pass(name="bad", run=fails, owner="acme"),)})
    assert torch.equal(program(x=X), model(X))  # undone, and the model runs without it


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


NORMED = {"inputs": {"x": InputSpec(("n", 16), torch.float32)}, "buckets": [8], "model": norm}
ROW = {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(3))}


def wrong_eps(graph: fx.GraphModule) -> list[str]:
    found = [node for node in graph.graph.nodes if node.target is RMS_NORM.overload]
    for node in found:
        node.args = (*node.args[:2], 0.1)
    return [node.name for node in found]


@pytest.mark.cases(1)
@pytest.mark.parametrize("level", ["sample", "full"])
def test_verification_finds_a_wrong_pass_and_the_model_runs_without_it(level: Any) -> None:
    device = {"passes": (rewrite(wrong_eps),)}
    with refused(PassError, "verifying pass 'acme_pass' of acme", "ratio", "report it to acme"):
        compiled(device, **NORMED, verify=level, examples=[ROW], strict=True)
    program = compiled(device, **NORMED, verify=level, examples=[ROW])
    (report,) = own(program.report().traces[0].passes)
    assert report.matched == 0 and "verifying pass 'acme_pass'" in report.error
    assert torch.equal(program(**ROW), norm(ROW["x"]))
    # Nothing else finds it.
    assert not torch.allclose(compiled(device, **NORMED)(**ROW), norm(ROW["x"]), rtol=1e-3)


def test_verification_accepts_right_passes() -> None:
    program = compiled(**NORMED, verify="full", examples={"main": [ROW]}, strict=True)
    assert {p.name: p.matched for p in program.report().traces[0].passes}["lift_rms_norm"] == 1


@pytest.mark.slow
def test_a_pass_of_stage_aten_sees_aten_ops_and_what_no_device_runs_as_the_model_wrote_it() -> None:
    seen: list[str] = []

    def look(context: PassContext) -> PassResult:
        seen.extend(str(node.target) for node in context.graph.nodes if node.op == "call_function")
        return PassResult(matched=1)

    late = Pass(name="late", run=look, owner="acme", stage="aten")
    program = compiled({"passes": (late,)}, **NORMED)
    assert "aten.rsqrt.default" in seen and not any(name.startswith("core.") for name in seen)
    (trace,) = program.report().traces
    assert trace.aten_s > 0 and "to ATen ops in" in str(program.report())
    assert [(p.name, p.stage) for p in own(trace.passes)] == [("late", "aten")]
    assert torch.equal(program(**ROW), norm(ROW["x"]))
    assert compiled(**NORMED).report().traces[0].aten_s == 0.0  # nobody asked for it

    seen.clear()
    implemented = OpImplementation(op="core::rms_norm", name="own", fn=RMS_NORM.reference)
    not_here = replace(implemented, missing="its library is not installed")
    compiled({"passes": (late,), "ops": (not_here,)}, **NORMED)
    assert "aten.rsqrt.default" in seen and "core.rms_norm.default" not in seen

    seen.clear()
    program = compiled({"passes": (late,), "ops": (implemented,)}, **NORMED)
    assert "core.rms_norm.default" in seen and "aten.rsqrt.default" not in seen
    assert [(c.op, c.implementation) for c in program.report().traces[0].ops] == [("core::rms_norm", "own")]


def test_a_pass_may_replace_the_output_without_metadata() -> None:
    def negate(graph: fx.GraphModule) -> list[str]:
        output = graph.graph.output_node()
        ((value,),) = output.args
        with graph.graph.inserting_before(output):
            output.args = ((graph.graph.call_function(torch.neg, (value,)),),)
        return [value.name]

    assert torch.equal(compiled({"passes": (rewrite(negate),)})(x=X), -model(X))


MERGING = {"enable_passes": ("merge_linears",)}


class Projections(nn.Module):
    """Two projections of one input, which are worth merging."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum(-1) + self.second(x).sum(-1)


def test_weights_that_a_program_reads_are_not_moved_by_a_later_compile() -> None:
    module = Projections().eval()
    options = {**NORMED, "model": module}
    expected = module(ROW["x"])
    with compiled(**options, **MERGING) as first:
        places = [parameter.data_ptr() for parameter in module.parameters()]
        torch.testing.assert_close(first(**ROW), expected)
        with compiled(**options, **MERGING) as second:
            torch.testing.assert_close(second(**ROW), expected)
        assert [parameter.data_ptr() for parameter in module.parameters()] == places
        assert merges(first) == 1
        # In place they may change, and both see it.
        with torch.no_grad():
            module.second.weight.mul_(2)
        torch.testing.assert_close(first(**ROW), module(ROW["x"]))


class Recorded(CallBackend):
    """Keeps nothing of what it captured, as graphs of hardware do, which hold addresses only."""

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, Tensor], after_warmup: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        outputs = super().capture_one(key, fn, inputs, after_warmup)
        kept = tuple(output.clone() for output in outputs)
        super().capture_one(key, lambda: kept, inputs, after_warmup)
        return kept


@pytest.mark.cases(1)
@pytest.mark.parametrize("backend", [CallBackend, Recorded])
def test_weights_are_left_where_they_are_if_another_program_reads_them(backend: type[CallBackend]) -> None:
    module = Projections().eval()
    options = {**NORMED, "model": module}
    with compiled({"graph_backend": backend}, **options, passes=()) as first:
        places = [parameter.data_ptr() for parameter in module.parameters()]
        with compiled(**options, **MERGING) as second:
            assert merges(second) == 0
            torch.testing.assert_close(second(**ROW), module(ROW["x"]))
        assert first.keys
        assert [parameter.data_ptr() for parameter in module.parameters()] == places


def test_what_a_device_finds_unprofitable_runs_where_it_is_asked_for() -> None:
    options = {**NORMED, "model": Projections().eval()}
    skipped = {p.name: p.skipped for p in compiled(**options).report().traces[0].passes}
    assert "slower on a processor" in skipped["merge_linears"]
    assert merges(compiled(**options, passes=("merge_linears",))) == 1


def merges(program: Program) -> int:
    return next(p.matched for p in program.report().traces[0].passes if p.name == "merge_linears")


# --- passes of core that a device declares anew


def anew(**changed: Any) -> Pass:
    (common,) = (each for each in COMMON_PASSES if each.name == "sequence_parallel")
    return replace(common, owner="wave", **changed)


def test_a_pass_that_a_device_declares_anew_stands_in_for_cores() -> None:
    own = anew(params={"least_bytes_of_2": 5}, traits=PassTraits(reads_content=False))
    found = device_passes(cpu(passes=(own, FUSE)))
    assert [each.name for each in found] == [*(each.name for each in COMMON_PASSES), FUSE.name]
    assert next(each for each in found if each.name == own.name) is own


@pytest.mark.parametrize("changed", [{"run": lambda context: PassResult()}, {"stage": "aten"}])
def test_another_pass_of_the_same_name_is_refused(changed: dict[str, Any]) -> None:
    with refused(PassError, "'sequence_parallel' of wave", "core registers a pass of the same name"):
        compiled({"passes": (anew(**changed),)})


def test_a_device_that_declares_a_pass_anew_twice_is_refused() -> None:
    with refused(PassError, "'sequence_parallel' of wave", "wave registers a pass of the same name"):
        compiled({"passes": (anew(params={"least_bytes_of_2": 5}), anew(params={"least_bytes_of_2": 6}))})
