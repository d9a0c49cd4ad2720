"""tools/lift_coverage/observe.py: module calls, function calls and the data flow of one eager run."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from lift_coverage.observe import Observation, observe


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).relu()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return turn(self.inner(self.inner(x)), x) + 1


def turn(x: Tensor, table: Tensor) -> Tensor:
    return x * table.cos()


def run(model: nn.Module) -> Observation:
    return observe(
        model, lambda x: model(x), {"x": torch.randn(2, 3)}, watch="turn".__eq__, tables=lambda name: name == "table"
    )


def test_calls_are_nested_and_own_their_ops() -> None:
    seen = run(Outer())
    assert [(call.path, call.parent) for call in seen.calls] == [("", -1), ("inner", 0), ("inner", 0)]
    own = {index: [op.name for op in ops] for index, ops in seen.own_ops().items()}
    assert own == {0: ["cos", "mul", "add"], 1: ["mul", "relu"], 2: ["mul", "relu"]}
    assert [call.path for call in seen.ancestors(2)] == ["inner", ""]


def test_values_lead_back_to_what_made_them() -> None:
    seen = run(Outer())
    second = seen.calls[2]
    made = seen.producer(second.input)
    assert made is not None and (made.name, made.call) == ("relu", 1)
    given = seen.producer(seen.calls[0].input)
    assert given is None


def test_a_write_in_place_makes_a_new_value() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.add_(x)
            return y.exp()

    model = Adds()
    seen = observe(model, lambda x: model(x), {"x": torch.randn(2)})
    made = seen.producer(seen.ops[-1].inputs[0])
    assert made is not None and made.name == "add_"


def test_functions_are_noted_with_their_ops_and_tables() -> None:
    (call,) = run(Outer()).functions
    assert (call.name, call.call, call.num_results, len(call.tables)) == ("turn", 0, 1, 1)
    assert call.stop - call.start == 2


def test_nothing_is_left_behind_even_by_a_failing_run() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    before = sys.getprofile()
    model = nn.Sequential(Inner(), Fails())
    with pytest.raises(ValueError, match="no"):
        observe(model, lambda x: model(x), {"x": torch.randn(2)})
    assert sys.getprofile() is before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
