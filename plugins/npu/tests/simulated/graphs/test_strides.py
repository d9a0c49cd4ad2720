"""Models whose own ops meet torch_npu's strides: the trace is refused where it would compute something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import core
from core.compilation.trace.tracing import trace
from core.host.selection import select_device

DEVICE = select_device("npu")
ROWS = torch.arange(24.0).view(4, 6)


def by_strides(x: Tensor) -> Tensor:
    y = x.T + 1
    return y.as_strided(y.shape, y.stride())


def copied(x: Tensor) -> Tensor:
    y = x.T + 1
    y.contiguous().mul_(2)
    return y


def rotated(x: Tensor) -> Tensor:
    y = x.T * 0.5
    return (y + y.roll(1, -1)).reshape(-1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_trace_computes_something_else_from_strides() -> None:
    x = ROWS.npu()
    traced = trace(by_strides, {"x": x})
    assert not torch.equal(traced.module(x)[0], by_strides(x))
    assert torch.equal(by_strides(x).cpu(), by_strides(ROWS))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("model", "told"), [(by_strides, "reads the strides of y"), (copied, "mul_ writes into"), (rotated, "")]
)
def test_such_a_model_runs_without_a_trace(model: Callable[[Tensor], Tensor], told: str) -> None:
    x = ROWS.npu()
    program = core.compile(model, example_inputs={"x": x}, device=DEVICE)
    assert torch.equal(program(x=x), model(x))
    assert set(program.report().modes.values()) == {"segmented" if told else "full"}
    assert told in str(program.report())
