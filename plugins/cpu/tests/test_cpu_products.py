"""core_cpu/passes/products.py and gelu.py: each spelling is found, with its numbers, and what is near is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core.common.numerics import judge
from core.common.passes import Pass
from core.compilation.rewrite import stages
from core.compilation.rewrite.pass_report import PassReport
from core.errors import TraceError
from core_cpu.passes import gelu
from core_cpu.passes.gelu import FUSE_TANH_GELU
from core_cpu.passes.products import LIFT_PRODUCTS
from tests.kernel_cases import randn

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = (torch.float32, torch.bfloat16)


def run(model: nn.Module, declared: Pass, x: Tensor, **options: Any) -> tuple[Tensor, PassReport, core.Program]:
    """Compile with this pass of the processor alone, op by op; return the result, the pass's report and the program."""
    device = replace(core.select_device("cpu"), passes=(declared,))
    settings: dict[str, Any] = {"lowering": "inline", "examples": [{"x": x}], "strict": True, **options}
    inputs = {"x": core.InputSpec(("rows", "tokens", x.shape[-1]), x.dtype)}
    buckets = [{"rows": x.shape[0], "tokens": x.shape[1]}]
    options = core.CompileOptions(**settings)
    program = core.compile(model.eval(), device, inputs=inputs, buckets=buckets, options=options)
    report = next(each for each in program.report().traces[0].passes if each.name == declared.name)
    return program(x=x).clone(), report, program


class Spelled(nn.Module):
    """A product by a function of the input, a weight (40, 56) and a bias; `further` goes to the function."""

    def __init__(self, product: Callable[..., Tensor], **further: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(40, 56, dtype=torch.float32, scale=0.15))
        self.bias = nn.Parameter(randn(56, dtype=torch.float32, seed=1))
        self.product, self.further = product, further

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias, **self.further).sin()


def added(x: Tensor, weight: Tensor, bias: Tensor, **scales: float) -> Tensor:
    return torch.addmm(bias, x.view(-1, x.shape[-1]), weight, **scales)


SPELLINGS = {
    "addmm": added,
    "operator": lambda x, weight, _: x @ weight,
    "method": lambda x, weight, bias: x.matmul(weight) + bias,
    "einsum": lambda x, weight, _: torch.einsum("bsi,io->bso", x, weight),
    "turned": lambda x, weight, _: torch.matmul(x[..., :28].repeat(1, 1, 2), weight.t()),
    "by name": lambda x, weight, _: torch.matmul(
        x[..., :28].repeat(1, 1, 2), torch.transpose(input=weight, dim0=0, dim1=1)
    ),
    "bmm": lambda x, weight, _: torch.bmm(x.flatten(0, 1)[None], weight[None]),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SPELLINGS)
@torch.no_grad()
def test_each_spelling_of_a_product_runs_on_the_kernel(name: str) -> None:
    for dtype in DTYPES:
        model, x = Spelled(SPELLINGS[name]).to(dtype), randn(2, 3, 40, dtype=dtype)
        found, report, program = run(model, LIFT_PRODUCTS, x, verify="full")
        assert (report.matched, report.near_misses, report.verification) == (1, (), "verified")
        kernel = "cpu_linear" if name in ("turned", "by name") else "cpu_linear_transposed"
        assert [choice.implementation for choice in program.report().traces[0].ops] == [kernel]
        exact = Spelled(SPELLINGS[name]).to(dtype).double()(x.double())
        assert judge(found, model(x), exact).passed


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (lambda x, _weight, _bias: x @ x.transpose(1, 2).contiguous(), "no constant that is bound to the graph"),
        (lambda x, weight, _: torch.bmm(x[..., :20], weight.view(2, 20, 56)), "it multiplies 2 batches, each by"),
        (lambda x, weight, _: x @ weight.sin(), "no constant that is bound to the graph"),
        (lambda x, weight, bias: torch.addmm(bias.view(1, 56), x.flatten(0, 1), weight), "not one number for"),
        (lambda x, weight, bias: added(x, weight, bias, beta=0.5, alpha=2), "it scales what it adds"),
    ],
    ids=["of inputs", "of batches", "of a computed weight", "with a row added", "with scales"],
)
@torch.no_grad()
def test_other_products_stay(product: Callable[..., Tensor], reason: str) -> None:
    def beside(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = product(x, weight, bias)
        return y.flatten()[0] + added(x, weight, bias)

    _, report, _ = run(Spelled(beside), LIFT_PRODUCTS, randn(2, 3, 40, dtype=torch.float32))
    assert report.matched == 1
    assert [reason in miss.reason for miss in report.near_misses] == [True]


@torch.no_grad()
def test_graphs_without_such_products_are_not_turned_into_aten_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "to_aten", None)
    layer = Spelled(lambda x, weight, _: nn.functional.linear(x, weight.T.contiguous()))
    _, report, _ = run(layer, LIFT_PRODUCTS, randn(2, 3, 40, dtype=torch.float32))
    assert report.skipped == "no product but those of linear layers reads a weight" and report.stage == "aten"


@torch.no_grad()
def test_a_graph_that_cannot_be_turned_into_aten_ops_runs_without_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: object) -> None:
        raise TraceError("turning node odd into ATen ops", found="planted", remedy="none")

    monkeypatch.setattr(stages, "to_aten", refuse)
    model, x = Spelled(added), randn(2, 3, 40, dtype=torch.float32)
    found, report, _ = run(model, LIFT_PRODUCTS, x, strict=False)
    assert report.matched == 0 and "planted" in report.skipped
    assert torch.allclose(found, model(x))
    with pytest.raises(TraceError):
        run(model, LIFT_PRODUCTS, x)


def new_gelu(x: Tensor, cubic: float = 0.044715, power: float = 3.0) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + cubic * torch.pow(x, power))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_gelu_written_out_is_one_op(dtype: torch.dtype) -> None:
    ((model, (x,)),) = gelu.examples()
    x = x.to(dtype)[None]
    found, report, _ = run(model, FUSE_TANH_GELU, x, verify="full")
    assert (report.matched, report.near_misses, report.verification) == (2, (), "verified")
    assert judge(found, model(x), model(x.double())).passed


@torch.no_grad()
def test_other_formulas_are_near_misses() -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return new_gelu(x, cubic=0.05) + new_gelu(x.cos(), power=2.0)

    _, report, _ = run(Other(), FUSE_TANH_GELU, randn(2, 3, 8, dtype=torch.float32))
    assert report.matched == 0
    assert sorted(miss.reason for miss in report.near_misses) == [
        "cubic is 0.05, in GELU 0.044715",
        "power is 2.0, in GELU 3",
    ]
