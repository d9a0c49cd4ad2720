"""core/common/passes/quantize/scales.py: equal static scales of one input are one quantisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.common.passes.cleanup.cse import ELIMINATE_COMMON_SUBEXPRESSIONS
from core.common.passes.quantize.scales import SHARE_QUANTIZE_SCALES
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.tracing import trace
from core.verify.execution import run_graph
from tests.common.passes.linear.merging import constants_of, tokens

FP8, INT8 = torch.float8_e4m3fn, torch.int8
ops: Any = torch.ops.core


class Layers(nn.Module):
    """Quantisations of one input by scales of their own; what: of each, its number, format and granularity."""

    def __init__(self, *what: tuple[Any, torch.dtype, str], written: bool = False) -> None:
        super().__init__()
        self.what, self.written = what, written
        for index, (scale, _, _) in enumerate(what):
            self.register_buffer(f"scale{index}", scale.clone() if isinstance(scale, Tensor) else torch.tensor(scale))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for index, (_, dtype, granularity) in enumerate(self.what):
            scale = getattr(self, f"scale{index}")
            if self.written:
                scale.add_(0.01)
            codes, used = ops.quantize(x, scale, dtype=dtype, granularity=granularity)
            found.append(codes.float() * used)
        return tuple(found)


def shared(model: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[int, PassReport]:
    """Run the pass and the elimination; return the quantisations left and the report, having compared every bit."""
    x = tokens(dtype)
    graph = trace(lambda x: model(x), {"x": x})
    constants = constants_of(graph)
    before = run_graph(graph.module, graph.values({"x": x})).outputs
    passes = [ELIMINATE_COMMON_SUBEXPRESSIONS, SHARE_QUANTIZE_SCALES]
    reports = PassManager(passes, strict=True).run(graph.module, constants=constants)
    after = run_graph(graph.module, graph.values({"x": x})).outputs
    assert all(map(torch.equal, after, before))
    left = sum(node.target in (ops.quantize, ops.quantize.default) for node in graph.module.graph.nodes)
    return left, next(report for report in reports if report.name == "share_quantize_scales")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_scales_become_one_quantisation(dtype: torch.dtype) -> None:
    left, report = shared(Layers((0.02, FP8, "tensor"), (0.02, FP8, "tensor"), (0.02, FP8, "tensor")), dtype)
    assert (left, report.matched, report.near_misses) == (1, 2, ())


OTHERS: dict[str, tuple[Layers, str]] = {
    "another number": (Layers((0.02, FP8, "tensor"), (0.03, FP8, "tensor")), "by another scale"),
    "another dtype of the scale": (
        Layers((0.5, FP8, "tensor"), (torch.tensor(0.5, dtype=torch.bfloat16), FP8, "tensor")),
        "by another scale",
    ),
    "another format": (Layers((0.02, FP8, "tensor"), (0.02, INT8, "tensor")), ""),
    "a scale that is written": (Layers((0.02, FP8, "tensor"), (0.02, FP8, "tensor"), written=True), ""),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_stay_apart_with_the_reason(case: str) -> None:
    model, reason = OTHERS[case]
    left, report = shared(model)
    assert (left, report.matched) == (2, 0)
    assert [reason in miss.reason for miss in report.near_misses] == [True] * bool(reason)


def test_scales_of_other_inputs_stay_apart() -> None:
    class Apart(Layers):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            one, other = (
                ops.quantize(value, scale, dtype=FP8, granularity="tensor")
                for value, scale in ((x, self.scale0), (x.sin(), self.scale1))
            )
            return one[0].float() * one[1], other[0].float() * other[1]

    left, report = shared(Apart((0.02, FP8, "tensor"), (0.02, FP8, "tensor")))
    assert (left, report.matched, report.near_misses) == (2, 0, ())


def test_without_the_constants_the_pass_is_skipped_with_the_reason() -> None:
    x = tokens()
    graph = trace(lambda x: Layers((0.02, FP8, "tensor"))(x), {"x": x})
    (report,) = PassManager([SHARE_QUANTIZE_SCALES], strict=True).run(graph.module)
    assert "weights" in str(report.skipped)
