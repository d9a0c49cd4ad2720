"""The suite's case on host-side arguments that are inputs, over the plugin's backend on a simulated `torch.npu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_npu import FakeNPU, plant
from host_lists import WINDOWS
from torch import Tensor

from core.common.conformance import ConformanceProfile, HostArgumentExample
from core.common.graphs.backend import GraphKey
from core.common.lowering import INLINE
from core.device import Device
from core.host.selection import select_device
from core_conformance.cases.calls import host_arguments as call_host_arguments
from core_conformance.trial import Trial
from core_npu.runner import NPUGraphBackend
from core_npu.updates import updatable


class Stale(NPUGraphBackend):
    """Renews nothing but the first time."""

    first: Mapping[str, Any] | None = None

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        self.first = self.first or dict(step)
        super().update(key, self.first)


class Careless(NPUGraphBackend):
    """Takes lists of any length."""

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        lists = {name: [*values, *[0] * 3][:3] for name, values in step.items()}
        super().update(key, lists)


def sums(x: Tensor, lens: Tensor) -> Tensor:
    result: Tensor = updatable(WINDOWS, x, host={"lengths": lens}, out=x.new_empty(len(x)))
    return result


def example(device: torch.device) -> HostArgumentExample:
    return HostArgumentExample(
        function=sums,
        inputs={"x": torch.arange(24.0).view(3, 8), "lens": torch.ones(3, dtype=torch.int32)},
        steps=({"lens": [1, 2, 3]}, {"lens": [8, 0, 5]}, {"lens": [4, 4, 4]}),
    )


def failures(backend: type[NPUGraphBackend], given: Any = example) -> list[str]:
    cpu = select_device("cpu")
    parts = replace(cpu.parts, capabilities=replace(cpu.parts.capabilities, modes=("full",), update=True))
    device: Device = replace(
        cpu, name="npu", parts=parts, lowerings=INLINE, graph_backend=lambda: backend(torch.device("cpu")), passes=()
    )
    trial = Trial("npu", lambda: (device, ConformanceProfile(host_argument_example=given)))
    call_host_arguments.host_arguments(trial, "full")
    return [str(failure) for failure in trial.failures]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNPU:
    return plant(monkeypatch)


def test_the_backend_passes() -> None:
    assert failures(NPUGraphBackend) == []


@pytest.mark.parametrize(
    ("backend", "phrase"), [(Stale, "step 1, called"), (Careless, "a replay with host-side arguments")]
)
def test_backends_that_break_the_promise_are_found(backend: type[NPUGraphBackend], phrase: str) -> None:
    assert any(phrase in text for text in failures(backend))


def test_an_example_without_a_difference_proves_nothing() -> None:
    def alike(device: torch.device) -> HostArgumentExample:
        return replace(example(device), steps=({"lens": [1, 1, 1]}, {"lens": [1, 1, 1]}))

    assert any("they prove nothing" in text for text in failures(NPUGraphBackend, alike))
