"""core_conformance/cases/host/sleeping.py: an honest memory passes, each lie is found, and none is no failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.host.selection import conformance_profile
from core_conformance.cases.host.sleeping import sleeping_memory
from core_conformance.trial import NotSupported, Trial
from tests.recording import acme
from tests.support import cpu

LARGE = 2**24


class Honest:
    """Host memory that loses its content when it is given back."""

    in_host_memory = False

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def allocate(self, num_bytes: int) -> Tensor:
        self.tensors.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.tensors[-1]

    def release(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(99)

    def restore(self) -> None:
        return None


class Moves(Honest):
    def restore(self) -> None:
        for tensor in self.tensors:
            tensor.set_(tensor.clone())  # type: ignore[call-overload]


class Slices(Honest):
    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes + 8, dtype=torch.uint8)[8:]


class WrongDtype(Honest):
    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes)


class HandsOutTwice(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.one = np.zeros(LARGE, dtype=np.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.from_numpy(self.one[:num_bytes])


class ReleasesAll(Honest):
    everything: tuple[Tensor, ...] = ()

    def allocate(self, num_bytes: int) -> Tensor:
        ReleasesAll.everything += (super().allocate(num_bytes),)
        return self.tensors[-1]

    def release(self) -> None:
        for tensor in ReleasesAll.everything:
            tensor.fill_(99)


def run(make: Any) -> list[str]:
    device = cpu()
    device = replace(device, parts=replace(device.parts, sleeping_memory=make))
    trial = Trial("cpu", lambda: (device, conformance_profile(device)))
    sleeping_memory(trial)
    return trial.failures


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "make", [Honest, cpu().parts.sleeping_memory, acme().parts.sleeping_memory], ids=["honest", "cpu", "acme"]
)
def test_honest_memory_passes(make: Any) -> None:
    assert run(make) == []


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Moves, "addresses have changed, first time"),
        (Slices, "allocate(1) gave a part of a storage of 9 bytes"),
        (WrongDtype, "allocate(1) gave (1,) torch.float32 on cpu"),
        (HandsOutTwice, "two tensors lie in the same memory"),
        (ReleasesAll, "memory that was not released"),
    ],
)
def test_a_lie_is_found(make: Any, found: str) -> None:
    failures = run(make)
    assert any(found in failure for failure in failures), failures


def test_a_device_without_such_memory_is_no_failure() -> None:
    with pytest.raises(NotSupported, match="no memory that can sleep"):
        run(None)
