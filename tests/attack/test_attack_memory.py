"""What a model's owner does with its weights goes on working after a compile that merges linears."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import core
from core import InputSpec, Program


class Pair(nn.Module):
    """A gate and an up projection of one input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = nn.functional.silu(self.gate(x)) * self.up(x)
        return gated


def merged(model: nn.Module) -> Program:
    inputs = {"x": InputSpec((4, 16), torch.float32)}
    return core.compile(
        model,
        "cpu",
        inputs=inputs,
        lowering="inline",
        strict=True,
        options=core.CompileOptions(enable_passes=("merge_linears",)),
    )


def num_merged(program: Program) -> int:
    return sum(r.matched for r in program.report().traces[0].passes if r.name == "merge_linears")


def test_training_goes_on_and_the_program_sees_it() -> None:
    model, other, x = Pair().eval(), Pair().eval(), torch.randn(4, 16)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    pending = model(x).square().sum()
    program = merged(model)
    assert num_merged(program) == 1
    pending.backward()
    other(x).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert torch.allclose(program(x=x), other(x), atol=1e-6)


def test_two_programs_of_one_model_and_the_end_of_one() -> None:
    model, x = Pair().eval(), torch.randn(4, 16)
    expected = model(x)
    first, second = merged(model), merged(model)
    assert num_merged(first) == num_merged(second) == 1
    first.close()
    assert torch.allclose(second(x=x), expected, atol=1e-6)
    assert torch.equal(model(x), expected)


def test_weights_in_shared_memory_stay_there() -> None:
    model = Pair().eval()
    model.share_memory()
    merged(model)
    assert all(parameter.is_shared() for parameter in model.parameters())
