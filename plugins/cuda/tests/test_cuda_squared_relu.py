"""core_cuda/passes/squared_relu.py and its kernel: matches, torch's bits, layouts, near-misses, and a mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from core.common.passes.mlp.gated_activation import LIFT_GATED_ACTIVATION
from core.errors import CoreError
from core.verify.planted import Mistake, with_mistake
from tests.kernel_cases import DTYPES, laid_out, moved, randn

pytest.importorskip("triton", reason="needs triton")
from cuda_compiled import compiled, device_with

from core_cuda.ops.squared_relu import squared_relu, why_not
from core_cuda.passes.squared_relu import FUSE_SQUARED_RELU

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
NAME = FUSE_SQUARED_RELU.name

SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "transformers'": lambda x: torch.square(functional.relu(x)),
    "methods": lambda x: x.relu().square(),
    "a power": lambda x: torch.relu(x) ** 2,
    "torch.pow": lambda x: torch.pow(nn.ReLU()(x), 2.0),
    "a product": lambda x: (lambda y: y * y)(torch.relu(x)),
    "ATen's": lambda x: torch.ops.aten.pow.Tensor_Scalar(torch.ops.aten.relu.default(x), 2),
}


def once(x: Tensor) -> Tensor:
    y = torch.relu(x)
    return y.square() + y


OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "used elsewhere": (once, "is used otherwise than in"),
    "in fp64": (lambda x: x.double().relu().square().to(x.dtype), "it is torch.float64, and the kernel takes "),
    "of integers": (lambda x: (x * 8).int().relu().square().to(x.dtype), "it is torch.int32"),
    "a single number": (lambda x: x + x.sum().relu().square(), "it is a single number"),
    "cubed": (lambda x: torch.relu(x).pow(3), ""),
    "a product of two": (lambda x: torch.relu(x) * torch.relu(-x), ""),
    "in place": (lambda x: functional.relu(x + 1, inplace=True).square(), ""),
    "of another activation": (lambda x: functional.silu(x).square(), ""),
}


class Layers(nn.Module):
    """Two MLPs without a gate, of which the second activates a slice of wider rows."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.ParameterList(nn.Parameter(randn(80, 48, seed=seed, scale=0.3)) for seed in (1, 2))
        self.down = nn.ParameterList(nn.Parameter(randn(48, size, seed=size, scale=0.2)) for size in (80, 64))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.act(x @ self.up[0].t()) @ self.down[0].t()
        return x + self.act((x @ self.up[1].t())[:, 16:]) @ self.down[1].t()


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    """Compare bits, the sign of zero included; any NaN is like any other."""
    whole = torch.int32 if found.dtype == torch.float32 else torch.int16
    same = found.view(whole) == wanted.view(whole)
    return bool((same | (found.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
@torch.no_grad()
def test_both_layers_become_one_launch_each_and_no_bit_changes(
    spelling: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x, model = randn(13, 48, dtype=dtype), Layers(SPELLINGS[spelling])
    device = device_with(kernel_device, FUSE_SQUARED_RELU)
    program, reports = compiled(model, device, x, verify="full", strict=True)
    assert (reports[NAME].matched, reports[NAME].near_misses) == (2, ())
    assert reports[NAME].verification == "verified"
    apart, reports = compiled(model, device, x, disable_passes=(NAME,))
    assert NAME not in reports
    assert same_bits(*(each(x=x.to(device.torch_device)).cpu() for each in (program, apart)))


@torch.no_grad()
def test_every_example_has_a_match(kernel_device: torch.device) -> None:
    for model, (x,) in FUSE_SQUARED_RELU.examples():  # type: ignore[misc]  # it has examples
        for dtype in DTYPES:
            reports = compiled(model, device_with(kernel_device, FUSE_SQUARED_RELU), x.to(dtype), strict=True)[1]
            assert reports[NAME].matched == 1, (model, dtype)


@pytest.mark.parametrize("case", OTHERS)
@torch.no_grad()
def test_others_stay(case: str, kernel_device: torch.device) -> None:
    act, reason = OTHERS[case]
    x = randn(9, 48, dtype=torch.bfloat16)
    report = compiled(Layers(act), device_with(kernel_device, FUSE_SQUARED_RELU), x, strict=True)[1][NAME]
    assert report.matched == 0
    assert [reason in miss.reason for miss in report.near_misses] == [True] * (2 if reason else 0)


@torch.no_grad()
def test_what_gates_stays_with_its_product(kernel_device: torch.device) -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gate, up = (x @ x.t() @ x).chunk(2, dim=-1)
            return torch.relu(gate).square() * up

    x = randn(9, 48, dtype=torch.bfloat16)
    reports = compiled(Gated(), device_with(kernel_device, FUSE_SQUARED_RELU), x, strict=True)[1]
    assert (reports[LIFT_GATED_ACTIVATION.name].matched, reports[NAME].matched) == (1, 0)


def halve(node: fx.Node) -> bool:
    """Square half of what is given."""
    if node.target is not squared_relu:
        return False
    with node.graph.inserting_before(node):
        halved = node.graph.call_function(torch.mul, (node.args[0], 0.5))
    halved.meta = dict(node.args[0].meta)  # type: ignore[union-attr]  # a node
    node.args = (halved,)
    return True


@torch.no_grad()
def test_a_planted_mistake_is_found(kernel_device: torch.device) -> None:
    mistake = Mistake(name="wrong", of=NAME, what=str(halve.__doc__), make=halve)
    device = device_with(kernel_device, with_mistake(FUSE_SQUARED_RELU, mistake))
    x = randn(9, 48, dtype=torch.bfloat16)
    with pytest.raises(CoreError, match=NAME):
        compiled(Layers(SPELLINGS["methods"]), device, x, verify="full", strict=True)


def rows(dtype: torch.dtype) -> list[Tensor]:
    """Return rows of any strides and lengths, with what is not finite, and none at all."""
    x = randn(2, 4, 3, 64, dtype=dtype, scale=3.0)
    special = randn(3, 700, dtype=dtype)
    special[0, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0])
    special[1, :4] = torch.tensor([300.0, 1e-6, 3e-4, 1e30]).to(dtype)  # squares beyond what fp16 has, or subnormal
    return [
        *(x, x.transpose(1, 2), x.permute(2, 0, 1, 3), x[::2, ::3, ::2, :32], x.transpose(2, 3), special),
        *(special[:, 1::2], special.t(), special[:1].expand(5, 700), randn(2, 5000, dtype=dtype)[:, 7:], special[0]),
        *(randn(0, 64, dtype=dtype), randn(5, 1, dtype=dtype)),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_and_the_layout_are_torchs(dtype: torch.dtype, kernel_device: torch.device) -> None:
    for x in rows(dtype):
        assert why_not(x) is None
        found, wanted = squared_relu(moved({"x": x}, kernel_device)["x"]), torch.square(torch.relu(x))
        assert laid_out([found]) == laid_out([wanted]), x.stride()
        assert same_bits(found.cpu(), wanted), (x.shape, x.stride())


def test_what_the_kernel_does_not_take_is_refused() -> None:
    assert "it is torch.float64" in str(why_not(torch.empty(2, 8, dtype=torch.float64)))
    assert "it is a single number" in str(why_not(torch.empty(())))
    assert "rows have 0 elements" in str(why_not(torch.empty(2, 0)))
