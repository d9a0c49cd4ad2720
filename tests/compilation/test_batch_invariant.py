"""`deterministic="batch"`: rows keep every bit in any batch, and what can't promise that is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core.common.lowering import INLINE
from core.compilation.options import CompileOptions
from core.compilation.rewrite.batch_invariant import in_vectors
from core.errors import LoweringError, UsageError
from core.host.selection import select_device
from tests.recording import acme
from tests.support import cpu, refused

BATCH = CompileOptions(deterministic="batch")


class Layers(nn.Module):
    """What a model is made of, of sizes that fill no vector."""

    def __init__(self, size: int = 45, hidden: int = 71) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, hidden), nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, x.transpose(-1, -2)) @ x


def program_of(model: nn.Module, options: CompileOptions = BATCH, device: Any = "cpu", size: int = 45) -> core.Program:
    example = torch.zeros(4, size, dtype=next(iter(model.parameters()), torch.zeros(0)).dtype)
    dims = {"input" if isinstance(model, nn.Sequential) else "x": {0: "batch"}}
    return core.compile(
        model.eval(), device, example_inputs=(example,), dynamic=dims, buckets=[1, 4, 16, 64], options=options
    )


@pytest.mark.parametrize("name", ["silu", "gelu", "tanh", "sigmoid", "exp", "softplus", "sin", "rsqrt", "erf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_function_gives_a_number_the_same_bits_wherever_it_stands(name: str, dtype: torch.dtype) -> None:
    x = torch.rand(40_003, generator=torch.Generator().manual_seed(0)).mul_(4).add_(0.01).to(dtype)
    whole = in_vectors(name, x)
    for first, count in ((0, 1), (0, 63), (5, 64), (17, 1000), (20_001, 20_002), (40_000, 3)):
        assert torch.equal(in_vectors(name, x[first : first + count]), whole[first : first + count])
    plain = getattr(nn.functional, name, None) or getattr(torch, name)
    torch.testing.assert_close(whole, plain(x))
    assert in_vectors(name, x[:6].view(2, 3).t()).shape == (3, 2)
    assert in_vectors(name, x[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_keep_every_bit_in_any_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    program = program_of(Layers().to(dtype))
    x = torch.randn(64, 45).to(dtype)
    whole = program(x).clone()
    for first, count in ((0, 1), (63, 1), (3, 4), (10, 11), (1, 63)):
        assert torch.equal(program(x[first : first + count]), whole[first : first + count])
    report = program.report()
    assert report.lowering == "inline"
    chosen = {choice.implementation for trace in report.traces for choice in trace.ops if choice.op == "core::linear"}
    assert chosen == {"cpu_linear_alike"}


def test_unasked_no_call_gets_what_is_there_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    report = program_of(Layers(), CompileOptions(lowering="inline")).report()
    chosen = [choice for trace in report.traces for choice in trace.ops]
    assert chosen
    assert not [each for each in chosen if "cpu_linear_alike" in (each.implementation, *each.others)]


def test_what_is_not_known_to_be_so_is_refused_by_name() -> None:
    with refused(LoweringError, "matmul", "a product whose order of sums depends on its sizes"):
        program_of(Product())
    with refused(LoweringError, "fft", "it is not known"):
        program_of(Spectrum())
    bare = cpu(ops=tuple(each for each in select_device("cpu").ops if not each.batch_invariant))
    with refused(LoweringError, "linear"):
        program_of(Layers(), device=bare)


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).real


@pytest.mark.parametrize(
    ("options", "phrases"),
    [
        ({"lowering": "inductor"}, ("lowering 'inductor' is not declared batch-invariant", "inline")),
        ({"mode": "off"}, ("mode 'off' runs the model's own code",)),
        ({"providers": {"core::linear": "torch_linear"}}, ("'torch_linear' is not declared", "cpu_linear_alike")),
    ],
    ids=["lowering", "mode", "provider"],
)
def test_options_that_contradict_it_are_refused(options: dict[str, Any], phrases: tuple[str, ...]) -> None:
    with refused(UsageError, *phrases):
        program_of(Layers(), replace(BATCH, **options))


def test_a_device_that_declares_nothing_is_refused() -> None:
    with refused(UsageError, "device 'acme' declares no lowering as batch-invariant"):
        program_of(Layers(), device=acme(lowerings=INLINE))


def test_its_value_is_checked() -> None:
    with refused(UsageError, "deterministic='all'", "choose one of: batch"):
        CompileOptions(deterministic="all")  # type: ignore[arg-type]


def test_a_provider_that_declares_it_may_be_named() -> None:
    program = program_of(Layers(), replace(BATCH, providers={"core::linear": "cpu_linear_alike"}))
    assert program(torch.ones(3, 45)).shape == (3, 45)
