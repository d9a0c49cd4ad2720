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

from core_cuda.passes.mixture_examples import quantised_twice
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
