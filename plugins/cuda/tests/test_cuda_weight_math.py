"""core_cuda/passes/weight_math.py: what is joined, with which bits, and what stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from core.errors import CoreError
from core.verify.planted import Mistake, with_mistake
from tests.kernel_cases import DTYPES, randn

pytest.importorskip("triton", reason="needs triton")
from cuda_compiled import compiled, device_with

from core_cuda.passes.weight_math import JOIN_WEIGHT_MATH

NAME = JOIN_WEIGHT_MATH.name
SIZES = (64, 32, 64)  # the processor computes what fills no vector with other bits


class Layers(nn.Module):
    """A layer for each size; what each computes of its weight is a factor of its input."""

    def __init__(self, how: Callable[[Tensor], Tensor], sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(randn(n, seed=seed)) for seed, n in enumerate(sizes))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum(-1, keepdim=True)
        for weight in self.weights:
            factor = self.how(weight)
            total = total + (x[:, : weight.shape[0]] * factor.to(x.dtype)).sum(-1, keepdim=True)
        return total


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "Mamba's": lambda weight: -torch.exp(weight.float()),
    "by methods": lambda weight: weight.float().exp().neg(),
    "RG-LRU's": lambda weight: functional.softplus(weight) * -8.0,
    "a number first": lambda weight: (1.0 + weight.to(torch.float32)).square(),
    "of itself": lambda weight: (weight * weight).sigmoid(),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one op": lambda weight: weight.exp(),
    "of two": lambda weight: weight.float() + weight.float().exp(),
    "summed": lambda weight: weight.float().exp() - weight.float().exp().sum(),
    "turned": lambda weight: weight.float().flip(0).exp(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
@torch.no_grad()
def test_layers_share_their_launches_and_no_bit_changes(
    spelling: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    model, x = Layers(SPELLINGS[spelling]).to(dtype), randn(5, 64, dtype=dtype)
    device = device_with(kernel_device, JOIN_WEIGHT_MATH)
    program, reports = compiled(model, device, x, verify="full", strict=True)
    assert (reports[NAME].matched, reports[NAME].near_misses) == (1, ())
    assert reports[NAME].verification == "verified"
    apart, _ = compiled(model, device, x, disable_passes=(NAME,))
    assert torch.equal(*(each(x=x.to(device.torch_device)).cpu() for each in (program, apart)))
    for weight in model.weights:  # what was loaded anew is what the next step computes with
        weight.copy_(randn(*weight.shape, dtype=dtype, seed=99))
    assert torch.equal(*(each(x=x.to(device.torch_device)).cpu() for each in (program, apart)))


@torch.no_grad()
def test_every_example_has_a_match(kernel_device: torch.device) -> None:
    for model, (x,) in JOIN_WEIGHT_MATH.examples():  # type: ignore[misc]  # it has examples
        reports = compiled(model, device_with(kernel_device, JOIN_WEIGHT_MATH), x, strict=True)[1]
        assert reports[NAME].matched == 1


@pytest.mark.parametrize("case", OTHERS)
@torch.no_grad()
def test_others_stay(case: str, kernel_device: torch.device) -> None:
    report = compiled(Layers(OTHERS[case]), device_with(kernel_device, JOIN_WEIGHT_MATH), randn(5, 64), strict=True)[1]
    assert (report[NAME].matched, report[NAME].near_misses) == (0, ())


@pytest.mark.parametrize(
    ("sizes", "matched", "reason"),
    [
        ((40,), 0, ""),
        ((40, 2), 0, "has 8 bytes, and what lies behind it would begin unaligned"),
        ((40, 2, 8), 1, ""),
    ],
)
@torch.no_grad()
def test_what_would_begin_unaligned_is_left_out(
    sizes: tuple[int, ...], matched: int, reason: str, kernel_device: torch.device
) -> None:
    model, device = Layers(SPELLINGS["Mamba's"], sizes), device_with(kernel_device, JOIN_WEIGHT_MATH)
    report = compiled(model, device, randn(5, 40), verify="full", strict=True)[1][NAME]
    assert report.matched == matched
    assert [reason in miss.reason for miss in report.near_misses] == [True] * bool(reason)


@torch.no_grad()
def test_a_weight_that_the_step_writes_stays(kernel_device: torch.device) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Buffer(randn(40, seed=seed)) for seed in (1, 2))

        def forward(self, x: Tensor) -> Tensor:
            before = -torch.exp(self.first.float())
            self.first.add_(1.0)
            return x * before * -torch.exp(self.first.float()) * -torch.exp(self.second.float())

    device = device_with(kernel_device, JOIN_WEIGHT_MATH)
    report = compiled(Written(), device, randn(5, 40), strict=True)[1][NAME]
    assert report.matched == 0


def reorder(node: fx.Node) -> bool:
    """Take the results of two layers for each other's."""
    if node.target is not torch.split or len(node.args[1]) != len(SIZES):  # type: ignore[arg-type]  # sizes
        return False
    first, _, last = sorted(node.users, key=lambda user: user.args[1])  # type: ignore[arg-type, return-value]
    first.args, last.args = last.args, first.args
    return True


@torch.no_grad()
def test_a_planted_mistake_is_found(kernel_device: torch.device) -> None:
    mistake = Mistake(name="reordered", of=NAME, what=str(reorder.__doc__), make=reorder)
    device = device_with(kernel_device, with_mistake(JOIN_WEIGHT_MATH, mistake))
    with pytest.raises(CoreError, match=NAME):
        compiled(Layers(SPELLINGS["Mamba's"]), device, randn(5, 64), verify="full", strict=True)
