"""core_conformance/runner/isolation.py: what a case can leave changed in torch is seen, named and put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from core_conformance.runner.isolation import TorchState, seed_all

KEPT: list[object] = []


def entered(mode: object) -> Callable[[], None]:
    """Return what enters a mode and never leaves it; some modes end with their last reference."""

    def enter() -> None:
        KEPT.append(mode)
        mode.__enter__()  # type: ignore[attr-defined]

    return enter


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "the default dtype from torch.float32 to torch.float64"),
        (lambda: torch.set_default_device("meta"), "the default device from None to meta"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads from "),
        (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "deterministic algorithms from (False, Fal"),
        (lambda: torch.set_float32_matmul_precision("high"), "the precision of fp32 products from highest to high"),
        (lambda: torch.set_grad_enabled(True), "grad mode from False to True"),
        (entered(torch.inference_mode()), "inference mode from False to True"),
        (entered(torch.autocast("cpu")), "autocast from () to ('cpu',)"),
        (entered(FakeTensorMode()), "the dispatch modes entered to FakeTensorMode"),
        (entered(TorchFunctionMode()), "the function modes entered to TorchFunctionMode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_change_is_named_and_put_back(change: Callable[[], None], phrase: str) -> None:
    with torch.no_grad():
        before = TorchState.read()
        assert before.changes() == ()
        change()
        assert any(text.startswith(phrase) for text in before.changes()), before.changes()
        assert before.restore() != ()
        assert before.changes() == () and before.restore() == ()
        made = torch.ones(2)
        assert type(made) is torch.Tensor and made.device.type == "cpu" and not made.is_inference()
    assert torch.is_grad_enabled()


def test_modes_that_were_there_before_stay() -> None:
    with FakeTensorMode() as outer, torch.device("meta"):
        before = TorchState.read()
        entered(TorchDispatchMode())()
        assert before.restore() == ("the dispatch modes entered to FakeTensorMode, TorchDispatchMode",)
        assert before.changes() == ()
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is outer
        assert torch.ones(1).device.type == "meta"
    assert TorchState.read().dispatch_modes == ()


def test_every_source_of_chance_is_seeded() -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    seed_all(2**40 + 5)
    first = draw()
    assert draw() != first
    seed_all(2**40 + 5)
    assert draw() == first
    seed_all(6)
    assert not set(draw()) & set(first)
