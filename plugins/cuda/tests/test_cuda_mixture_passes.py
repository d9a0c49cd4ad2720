"""core_cuda/passes/routers.py and shared_gates.py, and their kernels: matches, numbers, near-misses, and mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.numerics import Fp64Mode, judge, judge_pooled
from core.common.ops.linear import LINEAR
from core.errors import CoreError
from core.verify.planted import Mistake, with_mistake
from tests.kernel_cases import DTYPES, randn

pytest.importorskip("triton", reason="needs triton")
from cuda_compiled import compiled, device_with

from core_cuda.ops.linear import widened
from core_cuda.ops.moe import shared_gate
from core_cuda.passes.routers import WIDEN_ROUTERS
from core_cuda.passes.shared_gates import FUSE_SHARED_GATE

HALVES = (torch.bfloat16, torch.float16)


class Router(nn.Module):
    """Two routers in fp32; with one thing changed where `change` says so."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(randn(6, 48, seed=seed, scale=0.2)) for seed in (1, 2))
        self.bias, self.change = nn.Parameter(randn(6, seed=3)), change

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        for weight in self.weights:
            weight = weight * 2 if self.change == "computed" else weight
            bias = self.bias.float() if self.change == "bias" else None
            wide = x.float() if self.change != "other rows" else x.half().float()
            total = total + nn.functional.linear(wide, weight.float(), bias).sigmoid()
        return total


class Gated(nn.Module):
    """Two shared experts behind their gates; with one thing changed where `change` says so."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        rows = 2 if change == "two gates" else 1
        self.gates = nn.ParameterList(nn.Parameter(randn(rows, 48, seed=seed, scale=0.2)) for seed in (4, 5))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.gates:
            gate = torch.ops.core.linear(x[:1] if self.change == "one row" else x, weight)
            gate = gate.tanh() if self.change == "another function" else gate.sigmoid()
            gate = gate.sum(-1, keepdim=True) if self.change == "summed" else gate
            y = x.sin() + gate[:, :1] * x.cos() if self.change == "two gates" else x.sin() + gate * x.cos()
            x = y + gate if self.change == "reread" else y
        return x


PASSES: dict[str, tuple[Any, Callable[..., nn.Module]]] = {
    "widen_routers": (WIDEN_ROUTERS, Router),
    "fuse_shared_gate": (FUSE_SHARED_GATE, Gated),
}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_both_layers_become_one_launch_each(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    declared, model = PASSES[name]
    x = randn(13, 48, dtype=dtype)
    device = device_with(kernel_device, declared)
    program, reports = compiled(model(), device, x, verify="full", strict=True)
    nothing = name == "widen_routers" and dtype == torch.float32  # nothing is cast
    assert (reports[name].matched, reports[name].near_misses) == (0 if nothing else 2, ())
    assert reports[name].verification == ("" if nothing else "verified")
    apart, reports = compiled(model(), device, x, disable_passes=(name,))
    assert name not in reports
    results = [each(x=x.to(device.torch_device)).cpu() for each in (program, apart)]
    with Fp64Mode():
        exact = model().to(dtype).double()(x.double())
    verdict = judge(*results, exact)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", PASSES)
@torch.no_grad()
def test_every_example_has_a_match(name: str, kernel_device: torch.device) -> None:
    declared, _ = PASSES[name]
    for model, (x,) in declared.examples():
        for dtype in DTYPES:
            reports = compiled(model, device_with(kernel_device, declared), x.to(dtype), strict=True)[1]
            assert reports[name].matched == 1, (model, dtype)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("widen_routers", "computed", "is no constant"),
        ("widen_routers", "bias", "it has a bias"),
        ("widen_routers", "other rows", "is torch.float16, "),
        ("fuse_shared_gate", "another function", ""),
        ("fuse_shared_gate", "summed", ""),
        ("fuse_shared_gate", "reread", "is used otherwise than in"),
        ("fuse_shared_gate", "two gates", ""),
        ("fuse_shared_gate", "one row", "has other rows than"),
    ],
)
@torch.no_grad()
def test_others_stay(name: str, change: str, reason: str, kernel_device: torch.device) -> None:
    declared, model = PASSES[name]
    x = randn(9, 48, dtype=torch.bfloat16)
    report = compiled(model(change), device_with(kernel_device, declared), x, strict=True)[1][name]
    assert report.matched == 0
    assert [reason in miss.reason for miss in report.near_misses] == [True] * (2 if reason else 0)


def double_weight(node: fx.Node) -> bool:
    """Take the rows for the weight's other operand, doubled."""
    if node.target not in (widened.widened_linear, shared_gate.add_gated_expert):
        return False
    with node.graph.inserting_before(node):
        doubled = node.graph.call_function(torch.mul, (node.args[0], 2))
    doubled.meta = dict(node.args[0].meta)  # type: ignore[union-attr]  # a node
    node.args = (doubled, *node.args[1:])
    return True


@pytest.mark.parametrize("name", PASSES)
@torch.no_grad()
def test_a_planted_mistake_is_found(name: str, kernel_device: torch.device) -> None:
    declared, model = PASSES[name]
    mistake = Mistake(name="wrong", of=name, what=str(double_weight.__doc__), make=double_weight)
    device = device_with(kernel_device, with_mistake(declared, mistake))
    with pytest.raises(CoreError, match=name):
        compiled(model(), device, randn(9, 48, dtype=torch.bfloat16), verify="full", strict=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_of_halves_are_those_in_fp32(dtype: torch.dtype, kernel_device: torch.device) -> None:
    for rows, columns, depth in ((1, 6, 48), (5, 256, 200), (130, 33, 64), (0, 6, 48)):
        x, weight = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype, seed=1)
        found = widened.widened_linear(x.to(kernel_device), weight.to(kernel_device)).cpu()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, nn.functional.linear(x.float(), weight.float()), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gated_expert_is_what_four_ops_give(dtype: torch.dtype, kernel_device: torch.device) -> None:
    def four(x: Tensor, weight: Tensor, own: Tensor, routed: Tensor) -> Tensor:
        return routed + torch.sigmoid(nn.functional.linear(x, weight)) * own

    found, wanted, exact = [], [], []
    for rows, depth, size in ((1, 64, 64), (7, 100, 33), (3, 33, 300), (0, 64, 64)):
        x, weight = randn(rows, 2 * depth, dtype=dtype)[:, :depth], randn(1, depth, dtype=dtype, seed=1, scale=0.3)
        call = (x, weight, randn(rows, size, dtype=dtype, seed=2), randn(rows, size, dtype=dtype, seed=3))
        found.append(shared_gate.add_gated_expert(*(each.to(kernel_device) for each in call)).cpu())
        wanted.append(four(*call))
        exact.append(four(*(each.double() for each in call)))
    verdict = judge_pooled(found, wanted, exact)
    assert verdict.passed, verdict.reason


def test_what_the_kernels_do_not_take_is_refused() -> None:
    half, single = torch.empty(2, 8, dtype=torch.bfloat16), torch.empty(2, 8)
    assert widened.why_not(LINEAR.bind((half, half, None), {})) is None
    assert "it has a bias" in str(widened.why_not(LINEAR.bind((half, half, half[0]), {})))
    assert "x is torch.float32" in str(widened.why_not(LINEAR.bind((single, single, None), {})))
    assert shared_gate.why_not(half, half, half, half) is None
    assert "torch.bfloat16, torch.float32, and the kernel takes one" in str(
        shared_gate.why_not(half, half, single, half)
    )
    wide = torch.empty(1, 20_000, device="meta")
    assert "the kernel takes 16384 at most" in str(shared_gate.why_not(wide, wide, wide, wide))
