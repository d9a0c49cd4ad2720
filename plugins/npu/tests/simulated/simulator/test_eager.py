"""Ops of torch on the simulated device give the processor's values, whatever the dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from simulator import runtime

FLOATING = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)

Op = Callable[[Tensor], Tensor]

FLOATING_OPS: dict[str, Op] = {
    "add scalar": lambda x: x + 1.5,
    "subtract from scalar": lambda x: 1 - x,
    "scaled sum": lambda x: torch.add(x, x, alpha=0.5),
    "divide": lambda x: 2 / x,
    "divide down": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "remainder": lambda x: x % 0.7,
    "power": lambda x: x.pow(2),
    "root": lambda x: x.abs().rsqrt(),
    "exponent and logarithm": lambda x: x.exp().log1p(),
    "sine": lambda x: x.sin() * x.cos(),
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "gelu tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (8,), eps=1e-5).float().round(decimals=1),
    "softplus": torch.nn.functional.softplus,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "maximum": lambda x: torch.maximum(x, -x),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "masked fill": lambda x: x.masked_fill(x > 0, float("-inf")),
    "compare": lambda x: (x >= 0) & (x != 1),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.float().mean((0, 1)),
    "variance": lambda x: x.float().var(-1),
    "largest": lambda x: x.max(-1).values,
    "largest's place": lambda x: x.argmax(-1),
    "sort": lambda x: x.sort(dim=-1, descending=True).values,
    "top": lambda x: x.topk(3, dim=-1).indices,
    "running sum": lambda x: x.float().cumsum(-1),
    "softmax": lambda x: x.softmax(-1),
    "softmax in float32": lambda x: x.softmax(-1, dtype=torch.float32),
    "logarithmic softmax": lambda x: x.log_softmax(-1),
    "concatenate": lambda x: torch.cat((x, -x, x[..., :1]), -1),
    "stack": lambda x: torch.stack((x, x)),
    "repeat": lambda x: x.repeat(2, 1, 1).repeat_interleave(2, 0),
    "flip and roll": lambda x: x.flip(-1).roll(1, 0),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "triangle": lambda x: x.tril(1) + x.triu(),
    "strided": lambda x: x[:, ::2].transpose(0, 1) * 3,
    "into a slice": lambda x: x.clone().index_fill_(0, torch.tensor([1], device=x.device), 7),
    "select rows": lambda x: x[:, torch.tensor([2, 0], device=x.device)],
    "gather": lambda x: x.gather(-1, x.argsort(stable=True, dim=-1)),
    "put": lambda x: x.clone().index_put_((torch.tensor([0], device=x.device),), x[1:2] * 2),
    "selected": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: x.sign().unique(),
}


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("name", FLOATING_OPS)
def test_floating_ops_equal_the_processor(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = FLOATING_OPS[name](x.npu()), FLOATING_OPS[name](x)
    assert found.device.type == "npu"
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu().nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_products_round_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(5, 33, 16, generator=generator).to(dtype) for _ in range(2))
    bias = torch.randn(33, generator=generator).to(dtype)
    wide = x.double() @ y.double().transpose(1, 2)
    exact = wide + bias.double()
    batched = torch.baddbmm(bias.npu(), x.npu(), y.npu().transpose(1, 2)).cpu()
    linear = torch.nn.functional.linear(x.npu()[0], y.npu()[0], bias.npu()).cpu()
    # One rounding to the dtype, and the rounding of 17 sums in float32.
    for found, reference in ((batched, exact), (linear, exact[0]), ((x.npu() @ y.npu().mT).cpu(), wide)):
        bound = torch.finfo(dtype).eps / 2 * reference.abs() + 17 * torch.finfo(torch.float32).eps * 16
        assert ((found.double() - reference).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_convolutions_of_each_channel_equal_the_processor(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 6, 9), (6, 1, 4), (6,)))
    found = torch.nn.functional.conv1d(x.npu(), weight.npu(), bias.npu(), padding=3, groups=6).cpu()
    exact = torch.nn.functional.conv1d(x.double(), weight.double(), bias.double(), padding=3, groups=6)
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("upper", [False, True])
def test_triangular_systems_are_solved(upper: bool, unit: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    # The other triangle, and the diagonal of a unit system, are not read.
    matrix = torch.randn(6, 6, generator=generator) + 4 * torch.eye(6)
    known = torch.randn(3, 6, 5, generator=generator)
    found = torch.linalg.solve_triangular(matrix.npu(), known.npu(), upper=upper, unitriangular=unit).cpu()
    turned = torch.ops.aten.triangular_solve(known.npu(), matrix.npu(), upper, True, unit)[0].cpu()
    triangle = matrix.double().triu() if upper else matrix.double().tril()
    if unit:
        triangle.diagonal().fill_(1)
    for solved, system in ((found, triangle), (turned, triangle.mT)):
        torch.testing.assert_close(system @ solved.double(), known.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_ops_equal_the_processor(dtype: torch.dtype) -> None:
    x = torch.arange(1, 25).reshape(4, 6).to(dtype)
    for op in (
        lambda x: x + 3,
        lambda x: x * x,
        lambda x: x // 4,
        lambda x: x % 5,
        lambda x: x & 6,
        lambda x: x.sum(),
        lambda x: x.amax(0),
        lambda x: x > 7,
        lambda x: x.to(torch.float32) / 2,
        lambda x: x.eq(3).any(-1),
    ):
        found, expected = op(x.npu()), op(x)
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", (*FLOATING, torch.int32), ids=str)
def test_extremes_together_equal_the_processor(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(3)) * 9).to(dtype)
    for options in ({}, {"dim": 1}, {"dim": -1, "keepdim": True}):
        for found, expected in zip(torch.aminmax(x.npu(), **options), torch.aminmax(x, **options), strict=True):
            assert found.dtype == dtype and torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", (*FLOATING, torch.int32), ids=str)
def test_a_number_is_added_to_each_tensor_of_a_list(dtype: torch.dtype) -> None:
    tensors = [(torch.randn(3, size) * 9).to(dtype) for size in (1, 4)]
    number = 1.5 if dtype.is_floating_point else 2
    runtime.clear()
    sums = torch._foreach_add([each.npu() for each in tensors], number)
    assert runtime.kernels() == ["aclnnForeachAddScalarV2"]
    inside = [each.npu() for each in tensors]
    torch._foreach_add_(inside, number)
    for x, found, written in zip(tensors, sums, inside, strict=True):
        assert torch.equal(found.cpu(), x + number) and torch.equal(written.cpu(), x + number)


def test_bool_ops_equal_the_processor() -> None:
    x = torch.tensor([[True, False, True], [False, False, True]])
    for op in (torch.logical_not, lambda x: x ^ x.flip(-1), lambda x: x.all(-1), lambda x: x.cumsum(-1), lambda x: ~x):
        assert torch.equal(op(x.npu()).cpu(), op(x))


def test_equal_seeds_give_equal_numbers_and_offsets_advance() -> None:
    torch.manual_seed(5)
    first, second = (torch.randn(64, device="npu").cpu() for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(torch.randn(64, device="npu").cpu(), first)
    assert not torch.equal(first, second)
    drawn = torch.rand(2000, device="npu").cpu()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.05


def test_a_kernel_without_a_handler_raises_at_the_op_with_its_name() -> None:
    x = torch.randn(2, 3, 8, 8).npu()
    with pytest.raises(RuntimeError, match=r"aclnnAvgPool2d has no handler .* its arguments look like"):
        torch.nn.functional.avg_pool2d(x, 2)
    assert runtime.not_computed()["aclnnAvgPool2d"] >= 1
    assert torch.equal((x + 1).cpu(), x.cpu() + 1)


def test_a_handler_that_fails_raises_at_the_op_and_says_where() -> None:
    weights, places = torch.randn(4, 8).npu(), torch.tensor([9]).npu()
    with pytest.raises(RuntimeError, match=r"aclnnIndexSelect: .*index\.py"):
        weights.index_select(0, places)


def test_launches_are_logged_in_order() -> None:
    x = torch.randn(4, 4).npu()
    runtime.clear()
    _ = torch.relu(x @ x) * 2
    assert runtime.kernels() == ["aclnnMatmul", "aclnnRelu", "aclnnMuls"]
    assert runtime.kernels("run") == runtime.kernels("launch")


def test_copies_keep_values_and_layout() -> None:
    for dtype in (*FLOATING, *INTEGERS, torch.bool):
        x = (torch.arange(60).reshape(3, 4, 5) % 7).to(dtype)
        assert torch.equal(x.npu().cpu(), x)
        assert torch.equal(x.transpose(0, 2).npu().cpu(), x.transpose(0, 2))
        pinned = torch.empty(3, 4, 5, dtype=dtype, pin_memory=True)
        pinned.copy_(x.npu(), non_blocking=True)
        torch.npu.synchronize()
        assert torch.equal(pinned, x)
        assert torch.equal(pinned.to("npu", non_blocking=True).clone().cpu(), x)
    x = torch.arange(12).npu()
    x[2:5].copy_(torch.tensor([7, 8, 9]))
    assert x.tolist() == [0, 1, 7, 8, 9, 5, 6, 7, 8, 9, 10, 11]


def test_handlers_run_outside_of_modes_of_the_caller() -> None:
    x = torch.randn(4)
    with torch.device("npu"), torch.inference_mode():
        assert torch.equal((x.npu() * 2).cpu(), x * 2)
    with torch.autocast("npu", dtype=torch.float16):
        assert torch.equal((x.npu() * 2).cpu(), x * 2)
    y = x.npu().requires_grad_()
    (y * 3).sum().backward()
    assert torch.equal(y.grad.cpu(), torch.full((4,), 3.0))
