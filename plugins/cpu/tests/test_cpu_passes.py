"""core_cpu/passes/: what each pass of the processor matches, its numbers, near-misses, and mistakes that are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import core
from core.common.passes import Pass
from core.compilation.rewrite.pass_report import PassReport
from core.errors import CoreError
from core.verify.planted import Mistake, with_mistake
from core_cpu.quantized import PASSES, TOGETHER, quantized_linear
from tests.kernel_cases import DTYPES, randn

pytestmark = pytest.mark.usefixtures("kernels")

(JOIN_QUANTIZED_LINEARS,) = PASSES
INT8 = {"dtype": torch.int8}


class Block(nn.Module):
    """An attention's and an MLP's linear layers, of a size that no unit of the kernels divides."""

    def __init__(self) -> None:
        super().__init__()
        for name, inputs, outputs in (
            *(("q_proj", 48, 72), ("k_proj", 48, 24), ("v_proj", 48, 24)),
            *(("o_proj", 72, 48), ("gate_proj", 48, 104), ("up_proj", 48, 104), ("down_proj", 104, 48)),
        ):
            setattr(self, name, nn.Linear(inputs, outputs, bias=name in ("q_proj", "up_proj")))

    def forward(self, x: Tensor) -> Tensor:
        key = self.k_proj(x) * self.v_proj(x)
        x = x + self.o_proj(self.q_proj(x) + key.repeat_interleave(3, -1))
        out: Tensor = x + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Products(nn.Module):
    """Two quantised products; `further` are further arguments of the second one."""

    def __init__(self, *, apart: bool = False, **further: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name in ("one", "two"):
            self.register_buffer(name, torch.randint(-127, 128, (16, 48), dtype=torch.int8, generator=generator))
        self.register_buffer("scale", torch.full((16, 1), 0.01))
        self.apart, self.further = apart, further

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = torch.ops.core.quantize(x, None, **INT8)
        others, other_scale = torch.ops.core.quantize(x * 2, None, **INT8) if self.apart else (codes, scale)
        zeros = {"x_zero_point": codes[:, :1]} if self.further.get("zeros") else {}
        out = self.further.get("out_dtype", torch.float32)
        one = torch.ops.core.quantized_linear(codes, scale, self.one, self.scale, None, out_dtype=torch.float32)
        two = torch.ops.core.quantized_linear(others, other_scale, self.two, self.scale, None, out_dtype=out, **zeros)
        return one.sin(), two.cos()


def compiled(
    model: nn.Module, declared: Pass | None, x: Tensor, **options: Any
) -> tuple[core.Program, PassReport | None]:
    """Compile with this pass of the processor alone; return its report too."""
    device = replace(core.select_device("cpu"), passes=() if declared is None else (declared,))
    program = core.compile(
        model.eval(),
        device,
        inputs={"x": core.InputSpec(("rows", x.shape[-1]), x.dtype)},
        buckets=[len(x)],
        options=core.CompileOptions(lowering="inline", examples=[{"x": x}], **options),
    )
    reports = program.report().traces[0].passes
    return program, next((each for each in reports if declared is not None and each.name == declared.name), None)


def quantised(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return core.quantize(Blocks().to(dtype).eval().requires_grad_(False), "int8")


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_layers_of_one_input_are_one_call_with_the_same_bits(dtype: torch.dtype) -> None:
    x = randn(5, 48, dtype=dtype)
    program, report = compiled(quantised(dtype), JOIN_QUANTIZED_LINEARS, x, verify="full", strict=True)
    assert report is not None and (report.matched, report.expected, report.near_misses) == (4, 4, ())
    assert report.verification == "verified"
    assert report.sites == tuple(f"layers.{index}.{name}_proj" for index in range(2) for name in ("k", "gate"))
    plain, _ = compiled(quantised(dtype), None, x)
    assert torch.equal(program(x=x), plain(x=x))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Products(zeros=True), "x_zero_point, which joined layers do not take"),
        (Products(out_dtype=torch.bfloat16), "too, and has out_dtype torch."),
        (Products(out_dtype=torch.float64), "out_dtype is torch.float64"),
        (Products(apart=True), None),
    ],
    ids=["zero points", "another dtype", "a dtype without a kernel", "other codes"],
)
@torch.no_grad()
def test_layers_that_differ_stay_apart(model: nn.Module, reason: str | None) -> None:
    report = compiled(model, JOIN_QUANTIZED_LINEARS, randn(5, 48), strict=True)[1]
    assert report is not None and report.matched == 0
    assert [reason in miss.reason for miss in report.near_misses] == [True] * len(report.near_misses)
    assert bool(report.near_misses) is (reason is not None)


def exchange_scales(node: fx.Node) -> bool:
    """Give the first layer the second one's scales."""
    if node.target is not TOGETHER[3]:
        return False
    args = list(node.args)
    args[6] = args[9]
    node.args = tuple(args)
    return True


def forget_bias(node: fx.Node) -> bool:
    """Leave the second layer's bias out."""
    if node.target is not TOGETHER[2]:
        return False
    node.args = (*node.args[:7], None)
    return True


@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [exchange_scales, forget_bias])
@torch.no_grad()
def test_planted_mistakes_are_found(make: Any) -> None:
    mistake = Mistake(name="wrong", of=JOIN_QUANTIZED_LINEARS.name, what=str(make.__doc__), make=make)
    wrong = with_mistake(JOIN_QUANTIZED_LINEARS, mistake)
    with pytest.raises(CoreError, match="join_quantized_linears"):
        compiled(quantised(torch.float32), wrong, randn(5, 48), verify="full", strict=True)


@pytest.mark.parametrize("rows", [1, 3, 9, 70])
@pytest.mark.parametrize("count", TOGETHER)
def test_products_together_have_the_bits_of_each_alone(count: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-128, 128, (rows, 67), dtype=torch.int8, generator=generator)
    scale = torch.rand(rows, 1, generator=generator)
    weights: list[Any] = []
    for columns in (33, 8, 100)[:count]:
        weights += [torch.randint(-128, 128, (columns, 67), dtype=torch.int8, generator=generator)]
        weights += [torch.rand(columns, 1, generator=generator), torch.randn(columns) if columns == 8 else None]
    for dtype in DTYPES:
        found = TOGETHER[count](x, scale, *weights, out_dtype=dtype)
        alone = [quantized_linear(x, scale, *weights[3 * i : 3 * i + 3], out_dtype=dtype) for i in range(count)]
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, alone, strict=True))


def test_products_of_nothing_are_biases() -> None:
    x, weight, scale = (torch.empty(2, 0, dtype=torch.int8), torch.empty(3, 0, dtype=torch.int8), torch.ones(1))
    found = TOGETHER[2](x, scale, weight, scale, torch.arange(3.0), weight, scale, None, out_dtype=torch.float32)
    assert torch.equal(found[0], torch.arange(3.0).expand(2, 3)) and torch.equal(found[1], torch.zeros(2, 3))
