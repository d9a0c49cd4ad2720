"""intel-extension-for-pytorch itself, in an environment that has it (make test-ipex)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import core
from core.common.fakes import apply_fakes
from core.common.fakes.schema import find_overload
from core.common.ops.implementation import OpCall
from core.common.ops.norm.norms import RMS_NORM
from core.verify.fakes.parity import compare
from core_cpu.fakes import TORCH_IPEX
from core_cpu.ipex import norm, presence
from tests.kernel_cases import check

pytestmark = [
    pytest.mark.ipex,
    pytest.mark.skipif(bool(presence.why_not()), reason=presence.why_not() or "it is here"),
]
CPU = torch.device("cpu")


class Norm(nn.Module):
    """Weights in fp32 up to the end, as the kernel has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight.float() * wide).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down(functional.silu(self.up(self.norm(x))))
        return hidden


def takes(call: dict[str, Any]) -> bool:
    given = {argument.name: argument.default_value for argument in RMS_NORM.overload._schema.arguments} | call
    return norm.why_not_norm(OpCall(op="core::rms_norm", args=given)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_the_canonical_one(dtype: torch.dtype) -> None:
    calls = [sample.kwargs for sample in RMS_NORM.samples(dtype, CPU)]
    taken = [call for call in calls if takes(call)]
    assert 0 < len(taken) < len(calls)
    presence.load()
    check(RMS_NORM, norm.rms_norm, taken, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowering", ["ipex", "inductor", "inline"])
def test_a_program_with_its_norm_gives_what_the_model_gives(lowering: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Block().to(dtype).eval().requires_grad_(False)
    program = core.compile(
        model,
        "cpu",
        inputs={"x": core.InputSpec(("rows", 64), dtype)},
        buckets=[4],
        lowering=lowering,
        options=core.CompileOptions(providers={"core::rms_norm": "ipex_rms_norm"}),
    )
    choices = [each for trace in program.report().traces for each in trace.ops]
    (used,) = {each.implementation for each in choices if each.op == "core::rms_norm"}
    assert used == "ipex_rms_norm"
    x = torch.randn(3, 64, dtype=dtype)
    truth = model.double()(x.double())
    given, plain = program(x=x), model.to(dtype)(x)
    assert (given - truth).abs().max() <= 2 * (plain - truth).abs().max() + torch.finfo(dtype).eps


def test_the_fakes_agree_with_the_kernels() -> None:
    presence.load()
    results = dict(apply_fakes(TORCH_IPEX))
    for fake in TORCH_IPEX:
        assert results[fake].applied, (fake.op, results[fake].reason)
        op = find_overload(fake.op)
        assert op is not None and fake.samples is not None
        for sample in fake.samples(CPU):
            undeclared = ["writes its argument 'input1', which the schema does not declare"]
            wanted = undeclared if sample.name == "sum kept" else []
            assert compare(op, sample.kwargs) == wanted, (fake.op, sample.name)
