"""Area "fuzz", on request: random sequences of calls of one captured program, padding and state included."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.common.conformance import ConformanceProfile
from core.compilation.capture.inputs import InputSpec
from core.compilation.program import Program
from core.device import Device, Mode
from core_conformance.case import COMPILED_TIMEOUT_S, Case
from core_conformance.cases.calls.programs import doubled, make
from core_conformance.dtypes import working_dtype
from core_conformance.fuzzing.running import run_examples
from core_conformance.trial import Trial

if TYPE_CHECKING:
    from hypothesis.strategies import DataObject

_BUCKETS = (1, 2, 5, 8)
_WIDTH, _SLOTS = 128, 16
_TRASH = _SLOTS
"""The slot that padding writes to and nobody reads."""


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Return the cases of this module for a device."""
    for mode in device.capabilities.modes:
        if mode != "off":
            yield Case(
                id=f"fuzz/calls/{mode}",
                what=f"random sequences of calls of a program captured {mode}, its state included",
                run=partial(_fuzz, mode=mode),
                timeout_s=COMPILED_TIMEOUT_S,
            )


class _Stateful(nn.Module):
    """A gated MLP whose rows are written to slots of a cache and mixed with the content of other slots."""

    up: Tensor
    gate: Tensor
    cache: Tensor
    count: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in ("up", "gate"):
            self.register_buffer(name, torch.randn(_WIDTH, _WIDTH, generator=generator) * _WIDTH**-0.5)
        self.register_buffer("cache", torch.zeros(_SLOTS + 1, _WIDTH))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor, write: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows (B, W) of x (B, W), and how often this ran; write and read (B,) are slots."""
        hidden = functional.silu(x @ self.gate) * (x @ self.up)
        self.cache.index_copy_(0, write, hidden)
        self.count += 1
        return doubled(hidden) + self.cache[read], self.count * 1

    def reset(self) -> None:
        """Forget all calls."""
        self.cache.zero_()
        self.count.zero_()


class _Runs:
    """One program, and the same model run eagerly and in fp64 on the host, each with a state of its own."""

    def __init__(self, model: _Stateful, program: Program, dtype: torch.dtype) -> None:
        self._program, self._dtype = program, dtype
        self._eager, self._exact = copy.deepcopy(model), copy.deepcopy(model).to("cpu", torch.float64)
        self._models = (model, self._eager, self._exact)

    @torch.no_grad()
    def example(self, data: DataObject, own: Trial) -> None:
        """Draw a sequence of calls, from a state of zeros on, and judge each."""
        from hypothesis import strategies

        sizes = data.draw(strategies.lists(strategies.integers(1, _BUCKETS[-1]), min_size=1, max_size=6))
        own.note(f"calls of batch {', '.join(map(str, sizes))}")
        generator = torch.Generator().manual_seed(data.draw(strategies.integers(0, 2**16)))
        for model in self._models:
            model.reset()
        for step, size in enumerate(sizes):
            x = torch.randn(size, _WIDTH, generator=generator).to(self._dtype)
            write, read = (torch.randperm(_SLOTS, generator=generator)[:size] for _ in range(2))
            call: dict[str, Any] = {
                name: value.to(own.device.torch_device) for name, value in (("x", x), ("write", write), ("read", read))
            }
            results, eager = self._program(**call), self._eager(**call)
            name = f"call {step} of batch {size}"
            own.judge(f"{name}, rows", results[0], eager[0], self._exact(x.double(), write, read)[0])
            own.same(f"{name}, count", results[1], eager[1])


def _fuzz(trial: Trial, *, mode: Mode) -> None:
    """Compare random calls of one captured program with the same model run eagerly, and in fp64 on the host."""
    dtype = working_dtype(trial.device)
    model = _Stateful(trial.seed).to(trial.device.torch_device, dtype)
    slot = InputSpec(("batch",), torch.int64, padding="sentinel", value=_TRASH)
    inputs = {"x": InputSpec(("batch", _WIDTH), dtype), "write": slot, "read": slot}
    with make(trial.device, mode, model, inputs, buckets=_BUCKETS, reset=model.reset) as program:
        run_examples(trial, _Runs(model, program, dtype).example)
        fallbacks = program.report().fallbacks.items()
        trial.fail(*(f"{times} calls ran eagerly: {reason}" for reason, times in fallbacks))
