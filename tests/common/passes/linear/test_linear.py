"""core/common/passes/linear/lift.py: linears of bound weights, alone and with their gate, become a device's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core.common.ops.mlp.activation import GATED_ACTIVATION_FUSED
from core.common.passes import view
from core.common.passes.linear.lift import FUSE_GATED_LINEAR, LIFT_LINEAR
from core.common.passes.linear.merge import MERGE_LINEARS
from core.common.passes.mlp.gate_up import FUSE_GATE_UP
from core.common.passes.mlp.gated_activation import LIFT_GATED_ACTIVATION
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.trace.tracing import trace
from core.verify.execution import run_graph
from tests.common.passes.linear.merging import Decoder, constants_of, tokens
from tests.marks import slow_except

PASSES = (LIFT_GATED_ACTIVATION, MERGE_LINEARS, FUSE_GATE_UP, LIFT_LINEAR, FUSE_GATED_LINEAR)
BOTH = frozenset({LINEAR.qualified_name, GATED_LINEAR.qualified_name})
GATE = GATED_ACTIVATION_FUSED.overload


def calls(module: fx.GraphModule, target: object) -> list[Any]:
    return [node for node in module.graph.nodes if node.target is target]


def plain(module: fx.GraphModule) -> list[Any]:
    return [node for node in module.graph.nodes if view.kind(node) == "linear"]


class Fused:
    """A traced model after some passes; no bit may differ from the graph without the last ones."""

    def __init__(
        self, model: Callable[..., Any], x: Tensor, passes: Any = PASSES, implemented: frozenset[str] = BOTH
    ) -> None:
        graph = trace(model, {"x": x}, dynamic={"x": [1]})
        self.module, constants = graph.module, constants_of(graph)
        unfused: list[fx.GraphModule] = []

        def check(report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> None:
            if report.name in (LIFT_LINEAR.name, FUSE_GATED_LINEAR.name):
                unfused.append(before)

        manager = PassManager(passes, strict=True, implemented=implemented)
        reports = manager.run(self.module, constants=constants, check=check)
        self.reports = {report.name: report for report in reports}
        self.values = [*graph.values({"x": x}), *(tensor for _, tensor in constants.added)]
        for before in unfused[:1]:
            self.assert_equal(before, self.module)

    def assert_equal(self, one: fx.GraphModule, other: fx.GraphModule) -> None:
        runs = [run_graph(module, self.values).outputs for module in (one, other)]
        assert all(map(torch.equal, *runs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "dtype"),
    slow_except(product(("---", "b-b"), (torch.float32, torch.bfloat16)), ("b-b", torch.float32)),
    ids=str,
)
def test_every_linear_of_a_decoder_becomes_one_of_two_ops(kinds: str, dtype: torch.dtype) -> None:
    found = Fused(Decoder(2, kinds=kinds, dtype=dtype), tokens(dtype))
    # A layer has query, key and value merged, the output, gate and up merged, and down.
    assert {name: report.matched for name, report in found.reports.items() if report.matched} == {
        "lift_gated_activation": 2,
        "merge_linears": 4,
        "fuse_gate_up": 2,
        "lift_linear": 8,
        "fuse_gated_linear": 2,
    }
    assert not plain(found.module) and not calls(found.module, GATE)
    linears, gated = calls(found.module, LINEAR.overload), calls(found.module, GATED_LINEAR.overload)
    assert (len(linears), len(gated)) == (6, 2)
    assert [node.args[2] is not None for node in linears] == [kinds != "---", False, False] * 2
    assert all(node.kwargs["kind"] == "silu" and node.kwargs["gate_first"] for node in gated)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_except((torch.float32, torch.bfloat16), torch.bfloat16), ids=str)
def test_what_no_implementation_takes_is_a_plain_linear_again(dtype: torch.dtype) -> None:
    found = Fused(Decoder(2, dtype=dtype), tokens(dtype))
    restored = Snapshot(found.module).module()
    choices = choose_implementations(restored, ())
    chosen = {(choice.op, choice.implementation) for choice in choices}
    assert {("core::linear", "original"), ("core::gated_linear", "original")} <= chosen
    assert len(plain(restored)) == 8 and not calls(restored, LINEAR.overload)
    found.assert_equal(found.module, restored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implemented", "num_ops"),
    slow_except(
        [
            (frozenset(), (8, 0, 0)),
            ({"core::linear"}, (0, 8, 0)),
            ({"core::gated_linear"}, (6, 0, 2)),
            (BOTH, (0, 6, 2)),
        ],
        ({"core::gated_linear"}, (6, 0, 2)),
    ),
)
def test_each_runs_only_where_the_device_brings_its_op(implemented: set[str], num_ops: tuple[int, ...]) -> None:
    found = Fused(Decoder(2), tokens(), implemented=frozenset(implemented))
    ops = (plain(found.module), *(calls(found.module, op.overload) for op in (LINEAR, GATED_LINEAR)))
    assert tuple(map(len, ops)) == num_ops
    for declared, op in ((LIFT_LINEAR, LINEAR), (FUSE_GATED_LINEAR, GATED_LINEAR)):
        skipped = "" if op.qualified_name in implemented else f"the device does not implement {op.qualified_name}"
        assert found.reports[declared.name].skipped == skipped


def test_linears_are_merged_before_and_never_after() -> None:
    """However the passes are given, merging sees the linears as the model wrote them."""
    found = Fused(Decoder(1), tokens(), passes=PASSES[::-1])
    assert found.reports["merge_linears"].matched == 2 and found.reports["fuse_gated_linear"].matched == 1


class Gated(nn.Module):
    """A linear and the gate of its result; `other` says what else happens to it."""

    def __init__(self, other: str = "") -> None:
        super().__init__()
        self.gate_up, self.other = nn.Linear(64, 32), other

    def forward(self, x: Tensor) -> Any:
        weight = self.gate_up.weight * 2 if self.other == "computed" else self.gate_up.weight
        if self.other == "written":
            weight.mul_(2)
        whole = F.linear(x, weight, self.gate_up.bias)
        options = {"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0, "interleaved": True, "gate_first": False}
        gated = GATE(whole.sin() if self.other == "between" else whole, **options)
        return (gated, whole.cos()) if self.other == "used" else gated


def test_options_of_the_gate_are_kept() -> None:
    found = Fused(Gated(), tokens(), passes=(FUSE_GATED_LINEAR,))
    assert found.reports["fuse_gated_linear"].matched == 1
    (node,) = calls(found.module, GATED_LINEAR.overload)
    options = {"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0, "interleaved": True, "gate_first": False}
    assert node.kwargs == options and node.args[2] is not None


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("other", "reasons"),
    [
        ("used", ["is used by cos too"]),
        ("computed", ["is no constant that is bound to the graph"]),
        ("written", ["is written by the graph"]),
        ("between", []),
    ],
)
def test_other_gates_stay_two_ops_with_the_reason(other: str, reasons: list[str]) -> None:
    found = Fused(Gated(other), tokens(), passes=(FUSE_GATED_LINEAR,))
    report = found.reports["fuse_gated_linear"]
    assert report.matched == 0 and len(calls(found.module, GATE)) == 1
    assert [reason in miss.reason for reason, miss in zip(reasons, report.near_misses, strict=True)] == [True] * len(
        reasons
    )


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda weight, x: F.linear(x, weight * 2), "mul is no constant"),
        (lambda weight, x: F.linear(x, x[0]), "is no constant"),
        (lambda weight, x: F.linear(x, weight, x[0, 0, :1].expand(48)), "expand is no constant"),
    ],
    ids=["a computed weight", "the input itself", "a computed bias"],
)
def test_linears_of_computed_weights_stay_with_the_reason(model: Callable[..., Tensor], reason: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 64))

        def forward(self, x: Tensor) -> Tensor:
            return model(self.weight, x)

    found = Fused(Model(), tokens(), passes=(LIFT_LINEAR,))
    (miss,) = found.reports["lift_linear"].near_misses
    assert found.reports["lift_linear"].matched == 0 and reason in miss.reason and len(plain(found.module)) == 1


def test_under_autocast_dtypes_differ_and_the_linear_stays() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 48)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.proj(x).float()

    found = Fused(Model(), tokens(), passes=(LIFT_LINEAR,))
    (miss,) = found.reports["lift_linear"].near_misses
    assert found.reports["lift_linear"].matched == 0 and "bfloat16" in miss.reason
