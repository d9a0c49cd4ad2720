"""core/common/kernel_compilers.py: what a device compiles with is counted, whoever brings the compiler."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import core
from core.common.kernel_compilers import INDUCTOR, Count, KernelCompiler, counting_kernels
from core.device import Device
from tests.support import cpu


class Acme:
    """A compiler that makes a kernel at each call, and knows who counts."""

    def __init__(self) -> None:
        self.made = torch.zeros((), dtype=torch.int64)  # a Python int would be state, and refused in a capture
        self.listening = 0

    @contextmanager
    def counting(self) -> Iterator[Count]:
        before = int(self.made)
        self.listening += 1
        try:
            yield lambda: int(self.made) - before
        finally:
            self.listening -= 1

    def device(self) -> Device:
        found = cpu()
        declared = KernelCompiler(name="acme", counting=self.counting, package="packaging")
        return replace(found, parts=replace(found.parts, kernel_compilers=(declared,)))


def test_every_device_has_torchs_own_and_what_its_plugin_declares() -> None:
    assert cpu().kernel_compilers[0] == INDUCTOR
    assert [each.name for each in cpu().kernel_compilers] == ["inductor", "aot_inductor", "core_cpu"]
    assert [each.name for each in Acme().device().kernel_compilers] == ["inductor", "acme"]


def test_a_compile_counts_what_the_devices_compiler_makes_meanwhile() -> None:
    acme = Acme()

    def model(x: Tensor) -> Tensor:
        assert acme.listening == 1
        acme.made.add_(1)
        return x * 2

    acme.made.fill_(7)
    inputs = {"x": core.InputSpec((4,), torch.float32)}
    program = core.capture(model, acme.device(), inputs=inputs, mode="compile")
    made = int(acme.made) - 7
    assert program.report().num_kernels == made > 0
    assert acme.listening == 0


def test_a_failing_block_ends_the_counting() -> None:
    acme = Acme()
    with pytest.raises(ValueError, match="broken"), counting_kernels(acme.device().kernel_compilers):
        assert acme.listening == 1
        raise ValueError("broken")
    assert acme.listening == 0


def test_inductor_is_counted_by_what_its_cache_did_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    counters: dict[str, Counter[str]] = {"inductor": Counter(fxgraph_cache_miss=3, fxgraph_cache_hit=9)}
    utils: Any = SimpleNamespace(counters=counters)
    monkeypatch.setitem(sys.modules, "torch._inductor", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    with INDUCTOR.counting() as count:
        assert count() == 0
        counters["inductor"].update(fxgraph_cache_miss=2, fxgraph_cache_bypass=1, fxgraph_cache_hit=5)
        assert count() == 3
    monkeypatch.delitem(sys.modules, "torch._inductor")
    with INDUCTOR.counting() as count:
        assert count() == 0
