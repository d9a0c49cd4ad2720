"""Programs of ops that write what their schemas call read only give what eager gives, and leave buffers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from npu_kernel_cases import npu
from torch import Tensor, nn

import core
from tests.kernel_cases import randn

pytestmark = pytest.mark.npu_sim
ops: Any = torch.ops

HEADS = {"query": (2, 3, 4, 128), "key": (2, 3, 1, 128), "cos": (2, 3, 1, 128), "sin": (2, 3, 1, 128)}
ROWS = {"x": (5, 64)}


def copied(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    source = query.sin()
    kept = torch.empty_like(source)
    kept.copy_(source)
    turned, _ = ops.npu.npu_apply_rotary_pos_emb(kept, key * 1, cos, sin)
    return turned + 0, source * 2


def repeated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    turned, _ = ops.npu.npu_apply_rotary_pos_emb(query.sin(), key * 1, cos, sin)
    return turned + 0, query.sin() * 2


def cloned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    turned, other = ops.npu.npu_apply_rotary_pos_emb(query.clone(), key.clone(), cos, sin)
    return turned + 0, other + 0, query.mean(-1)


def masked(x: Tensor) -> tuple[Tensor, ...]:
    first, second = x * 2, x * 2
    ops.atb._npu_group_topk(first, 4, 8, 2)
    return first + 0, second + 0


@pytest.mark.parametrize("function", [copied, repeated, cloned, masked], ids=lambda each: each.__name__)
def test_a_program_gives_what_eager_gives(function: Callable[..., tuple[Tensor, ...]]) -> None:
    device = npu()
    shapes = ROWS if function is masked else HEADS
    inputs = {name: randn(*shape, dtype=torch.float16).to(device) for name, shape in shapes.items()}
    wanted = function(**{name: value.clone() for name, value in inputs.items()})
    specs = {name: core.InputSpec(shape, torch.float16) for name, shape in shapes.items()}
    program = core.compile(function, core.select_device("npu"), inputs=specs, mode="full", strict=True)
    for _ in range(2):
        found = program(**inputs)
        assert [torch.equal(*each) for each in zip(found, wanted, strict=True)] == [True] * len(wanted)


class Table(nn.Module):
    """Rotates a copy of a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", randn(1, 5, 1, 64, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        key, cos, sin = (each.view(1, 5, 1, 64) for each in (x * 1, x * 0.5, x * 2))
        turned, _ = ops.npu.npu_apply_rotary_pos_emb(self.table.clone(), key, cos, sin)
        return turned + 0


def test_a_buffer_keeps_its_values() -> None:
    device = npu()
    model, x = Table().to(device), randn(5, 64, dtype=torch.float16).to(device)
    before, wanted = model.table.clone(), model(x)
    specs = {"x": core.InputSpec((5, 64), torch.float16)}
    program = core.compile(model, core.select_device("npu"), inputs=specs, mode="full", strict=True)
    for _ in range(2):
        assert torch.equal(program(x=x), wanted) and torch.equal(model.table, before)
