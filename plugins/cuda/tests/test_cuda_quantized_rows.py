"""core_cuda/passes/quantized_rows.py: rows quantised once in two shapes, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.errors import CoreError
from core.verify.planted import Mistake, with_mistake
from tests.kernel_cases import randn

pytest.importorskip("triton", reason="needs triton")
from cuda_compiled import compiled, device_with

from core_cuda.passes.examples.mixture import quantised_twice
from core_cuda.passes.quantized_rows import SHARE_QUANTIZED_ROWS

NAME = SHARE_QUANTIZED_ROWS.name
INT8 = {"dtype": torch.int8}


class Twice(nn.Module):
    """Rows quantised for one layer, and what they are a view of for another."""

    def __init__(self, first: dict[str, Any], second: dict[str, Any], size: int = 40) -> None:
        super().__init__()
        self.first, self.second, self.size = first, second, size

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        codes, scale = torch.ops.core.quantize(x.view(-1, self.size), None, **self.first)
        rows = codes.float().sin(), scale.cos()
        codes, scale = torch.ops.core.quantize(x, None, **self.second)
        return *rows, codes.float().cos(), scale.sin()


class Reread(Twice):
    """What becomes of the rows or the results in between decides whether they may share memory."""

    def __init__(self, change: str) -> None:
        super().__init__(INT8, INT8)
        self.change = change

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.transpose(0, 1).sin() if self.change == "copied" else x.sin()
        rows = x.reshape(-1, self.size)
        if self.change == "copied":
            x.add_(5)
        codes, scale = torch.ops.core.quantize(rows, None, **self.first)
        others, _ = torch.ops.core.quantize(x, None, **self.second)
        if self.change == "written":
            codes.mul_(0)
        return codes if self.change == "returned" else codes.float().sin(), scale.cos(), others.float().cos()


@pytest.mark.parametrize(
    ("change", "reason"),
    [("copied", "is a copy of"), ("written", "a result is written later"), ("returned", "a result is returned")],
)
@torch.no_grad()
def test_results_that_would_share_memory_stay(change: str, reason: str, kernel_device: torch.device) -> None:
    x = randn(2, 5, 40)
    program, reports = compiled(Reread(change), device_with(kernel_device, SHARE_QUANTIZED_ROWS), x, strict=True)
    assert reports[NAME].matched == 0 and reason in reports[NAME].near_misses[0].reason
    wanted = Reread(change).to(kernel_device)(x.to(kernel_device))
    for one, other in zip(program(x=x.to(kernel_device)), wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn], ids=str)
@torch.no_grad()
def test_rows_are_quantised_once_with_the_same_bits(
    code: torch.dtype, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x = randn(2, 5, 40, dtype=dtype)
    device = device_with(kernel_device, SHARE_QUANTIZED_ROWS)
    model = Twice({"dtype": code}, {"dtype": code})
    program, reports = compiled(model, device, x, verify="full", strict=True)
    report = reports[NAME]
    assert (report.matched, report.near_misses, report.verification) == (1, (), "verified")
    apart, reports = compiled(model, device, x, disable_passes=(NAME,))
    assert NAME not in reports
    inputs = x.to(device.torch_device)
    for one, other in zip(program(x=inputs), apart(x=inputs), strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_the_example_has_a_match(kernel_device: torch.device) -> None:
    for model, (x,) in quantised_twice():
        assert compiled(model, device_with(kernel_device, SHARE_QUANTIZED_ROWS), x, strict=True)[1][NAME].matched == 1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice(INT8, {"dtype": torch.float8_e4m3fn}), "with dtype torch.float8_e4m3fn, not torch.int8"),
        (Twice(INT8, INT8, size=20), "cuts the rows of"),
        (Twice(*({**INT8, "granularity": "tensor"},) * 2), "makes no scale for each token by itself"),
    ],
    ids=["other codes", "other rows", "one scale"],
)
@torch.no_grad()
def test_other_quantisations_stay(model: nn.Module, reason: str, kernel_device: torch.device) -> None:
    device = device_with(kernel_device, SHARE_QUANTIZED_ROWS)
    report = compiled(model, device, randn(2, 5, 40), strict=True)[1][NAME]
    assert report.matched == 0 and [reason in miss.reason for miss in report.near_misses] == [True]


def exchange(node: fx.Node) -> bool:
    """Read a scale twice as large."""
    if node.op != "call_method" or node.target != "view" or node.args[1:] != (-1, 1):
        return False
    with node.graph.inserting_before(node):
        doubled = node.graph.call_function(torch.mul, (node.args[0], 2))
    doubled.meta = dict(node.args[0].meta)  # type: ignore[union-attr]  # a node
    node.args = (doubled, -1, 1)
    return True


@torch.no_grad()
def test_a_planted_mistake_is_found(kernel_device: torch.device) -> None:
    mistake = Mistake(name="wrong", of=NAME, what=str(exchange.__doc__), make=exchange)
    device = device_with(kernel_device, with_mistake(SHARE_QUANTIZED_ROWS, mistake))
    with pytest.raises(CoreError, match=NAME):
        compiled(Twice(INT8, INT8), device, randn(2, 5, 40), verify="full", strict=True)
