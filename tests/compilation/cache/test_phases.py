"""Programs of several phases and the compile cache: what the trace of any phase read counts, on its own callable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core import InputSpec, Program
from core.compilation.cache.store import Store
from core.compilation.shared_trace import SharedTrace
from tests.compilation.cache.cached_model import assert_miss, assert_warm, cache_of, counts
from tests.recording import acme
from tests.support import cpu

pytestmark = pytest.mark.usefixtures("cache_folder")

ROWS = {"x": InputSpec(("n", 4), torch.float32)}
BUCKETS = {"decode": [2], "prefill": [16]}
OFFSETS = {"decode": 0.5, "prefill": 0.25}
SHARED = SharedTrace(op="core::gated_activation", argument="up_offset", values=OFFSETS)
X = torch.ones(2, 4)


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Step:
    """A callable of one phase over a model that all phases share."""

    def __init__(self, model: nn.Module, offset: float, shift: float = 1.0) -> None:
        self.model, self.offset, self.shift = model, offset, shift

    def __call__(self, x: Tensor) -> Tensor:
        gated: Tensor = torch.ops.core.gated_activation(x, self.model(x), kind="silu", up_offset=self.offset)
        return gated + self.shift


class Counts(Scaled):
    """Keeps state by assigning, so that there is no trace of it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.by


def start(models: Any, device: Any = None, **options: Any) -> Program:
    given = core.CompileOptions(**{"lowering": "inline", "cache": True, **options})
    return core.compile(models, device or cpu(), inputs=ROWS, buckets=BUCKETS, options=given)


def steps(by: float = 2.0, **of_prefill: float) -> dict[str, Step]:
    model = Scaled(by)
    return {"decode": Step(model, OFFSETS["decode"]), "prefill": Step(model, OFFSETS["prefill"], **of_prefill)}


def test_a_change_of_one_phase_alone_is_a_miss() -> None:
    start({"decode": Scaled(2.0), "prefill": Scaled(3.0)})
    assert_warm(start({"decode": Scaled(2.0), "prefill": Scaled(3.0)}))
    program = start({"decode": Scaled(2.0), "prefill": Scaled(4.0)})
    assert_miss(cache_of(program), "prefill.by: 3.0 -> 4.0")
    assert torch.equal(program("prefill", x=X), X * 4)
    assert_warm(start({"decode": Scaled(2.0), "prefill": Scaled(3.0)}))  # both entries are kept


def test_what_a_shared_trace_read_is_read_of_each_phase() -> None:
    cold, warm = start(steps(), shared=SHARED), start(steps(), shared=SHARED)
    assert counts(cold)["traces"] == 1
    assert_warm(warm)
    for phase in OFFSETS:
        assert torch.equal(warm(phase, x=X), cold(phase, x=X))
    # The caller's word does not hold any more: what a trace of the other phase read is not what this one has.
    assert_miss(cache_of(start(steps(shift=5.0), shared=SHARED)), "prefill.shift: 1.0 -> 5.0")
    assert_miss(cache_of(start(steps(by=3.0), shared=SHARED)), "decode.model.by: 2.0 -> 3.0")


def test_which_module_is_which_of_two_phases_counts() -> None:
    one, other = Scaled(2.0), Scaled(2.0)
    start({"decode": one, "prefill": one})
    report = cache_of(start({"decode": one, "prefill": other}))
    assert_miss(report, "prefill: = phases['decode'] -> a ")


def test_a_phase_without_a_trace_has_no_part_in_the_entry() -> None:
    mode = {"decode": "full", "prefill": "segmented"}
    models = {"decode": Scaled(2.0), "prefill": Scaled(3.0)}
    start(models, acme(), mode=mode)
    (entry,) = Store.of_user().entries()
    summary = Store.of_user().summary(entry.name)
    assert [each.phase for each in summary.phases] == ["decode"]
    # It runs as it is, at every start, and what it computes is always its own.
    program = start({"decode": Scaled(2.0), "prefill": Scaled(4.0)}, acme(), mode=mode)
    assert_warm(program)
    assert torch.equal(program("prefill", x=X), X * 4)


def test_a_phase_that_turned_out_to_have_no_trace_is_tried_at_each_start() -> None:
    def make(by: float) -> Program:
        return start({"decode": Scaled(2.0), "prefill": Counts(by)}, acme(), mode=None)

    cold = make(3.0)
    assert cold.report().modes == {"decode": "full", "prefill": "off"} and cache_of(cold).state == "miss"
    warm = make(4.0)
    assert warm.report().modes == cold.report().modes and cache_of(warm).state == "hit"
    assert [each.cached for each in warm.report().traces] == [True]
    assert torch.equal(warm("prefill", x=X), X * 4)
