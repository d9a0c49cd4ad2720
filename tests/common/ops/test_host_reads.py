"""core/common/ops/host_reads.py: which calls make the host wait for an accelerator, and which only look like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import custom_op

from core.common.ops.host_reads import reads_host

NAMESPACE = "core_host_reads_test"


@pytest.fixture
def declared() -> Iterator[Callable[..., Any]]:
    """Returns the op that a Python function becomes, whose fake reads nothing."""
    made = []

    def declare(function: Callable[..., Tensor], **how: Any) -> Any:
        op: Any = custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=(), **how)
        op.register_fake(lambda x: torch.empty_like(x))
        made.append(op)
        return op._opoverload

    yield declare
    for op in made:
        op._lib._destroy()


def count(x: Tensor) -> Tensor:
    return torch.full_like(x, sum(x.tolist()))


def double(x: Tensor) -> Tensor:
    return x * 2


def launch(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape).fill_(float(x.data_ptr()))


def asks(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 3 else x.clone()


def places(x: Tensor) -> Tensor:
    return x.nonzero()[: x.shape[0], 0].to(x.dtype)


@pytest.mark.parametrize(
    ("code", "reads"), [(count, True), (asks, True), (places, True), (double, False), (launch, False)]
)
def test_an_op_is_judged_by_what_its_code_does_without_values(
    declared: Callable[..., Any], code: Any, reads: bool
) -> None:
    op, x = declared(code), torch.empty(4, device="meta")
    assert reads_host(op, (x,), {}, torch.empty_like(x)) is reads
    assert reads_host(op.overloadpacket, (x,), {}, torch.empty_like(x)) is reads
    assert not reads_host(op, (torch.ones(4),), {}, torch.ones(4))  # the values lie where the host reads them


def test_the_code_of_the_tensors_device_counts(declared: Callable[..., Any]) -> None:
    op, x = declared(count, device_types="cpu"), torch.empty(4, device="meta")
    assert not reads_host(op, (x,), {}, x)


def test_symbolic_sizes_are_those_of_the_trace(declared: Callable[..., Any]) -> None:
    seen: list[int] = []

    def sized(x: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return count(x)

    op = declared(sized)
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    x = mode.from_tensor(torch.empty(7, device="meta"), static_shapes=False)
    assert reads_host(op, (x,), {}, x)
    assert seen == [7] and not shape_env.guards


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_grouped_product_reads_where_its_groups_end_unless_there_is_a_kernel(dtype: torch.dtype) -> None:
    rows, matrices = torch.empty(6, 16, dtype=dtype, device="meta"), torch.empty(3, 16, 24, dtype=dtype, device="meta")
    for product in (torch._grouped_mm, torch.ops.aten._grouped_mm.default):
        assert reads_host(product, (rows, matrices, None), {}, rows) is (dtype is torch.float32)


def test_ops_of_torch_are_known_by_their_tags_and_by_sizes_that_are_data() -> None:
    x = torch.empty(4, device="meta")
    assert reads_host(torch.ops.aten.nonzero.default, (x,), {}, None)
    assert reads_host(torch.ops.aten._local_scalar_dense.default, (x,), {}, None)
    assert not reads_host(torch.ops.aten.mul.Tensor, (x, x), {}, x)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fake = mode.from_tensor(x, static_shapes=True)
    with mode:
        assert reads_host("nonzero", (fake,), {}, fake.nonzero())
        assert not reads_host("mul", (fake, 2), {}, fake * 2)
