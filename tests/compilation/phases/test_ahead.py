"""core/compilation/phases/ahead.py: kernels are asked for before anything runs them, once for calls that are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import InputSpec
from core.common.kernel_compilers import BeginKernels, Count, KernelCompiler
from core.common.ops.implementation import OpImplementation
from core.common.ops.norm.norms import rms_norm
from core.compilation.program import Program
from core.device import Device
from tests.recording import acme
from tests.support import Norm, compile_with

OP = "core::rms_norm"


@dataclass
class Ahead:
    """A compiler whose kernel of a call is there when it was begun, or run."""

    #: What happened, in order.
    events: list[tuple[object, ...]] = field(default_factory=list)
    fails: bool = False
    made: int = 0

    @contextmanager
    def counting(self) -> Iterator[Count]:
        before = self.made
        yield lambda: self.made - before

    @contextmanager
    def ahead(self) -> Iterator[BeginKernels]:
        self.events.append(("enter",))
        yield self.begin
        self.events.append(("leave",))

    def begin(self, fn: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        assert fn in (norm, other)
        x, weight = arguments["x"], arguments["weight"]
        assert x.device.type == weight.device.type == "meta"
        self.events.append((fn.__name__, tuple(x.shape), x.stride(), x.data_ptr() % 16, weight.data_ptr() % 16))
        if self.fails:
            raise RuntimeError("no such instruction")
        self.made += 1

    def begun(self) -> list[tuple[object, ...]]:
        return [event for event in self.events if event[0] in ("norm", "other")]

    def device(self, *ops: OpImplementation) -> Device:
        found = acme(ops=ops or (NORM,))
        compiler = KernelCompiler(name="ahead", counting=self.counting, ahead=self.ahead)
        return replace(found, parts=replace(found.parts, kernel_compilers=(compiler,)))


def norm(*args: Any, **kwargs: Any) -> Tensor:
    return rms_norm(*args, **kwargs)


def other(*args: Any, **kwargs: Any) -> Tensor:
    return rms_norm(*args, **kwargs)


NORM = OpImplementation(op=OP, name="norm", fn=norm)


class Norms(nn.Module):
    """Norms of 8 features with a weight each; `beyond`: how many elements behind an aligned address they lie."""

    def __init__(self, *beyond: int) -> None:
        super().__init__()
        self.weights = [torch.ones(16)[start : start + 8] for start in beyond]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.ops.core.rms_norm(x, weight, 1e-5)
        return x


def compiled(device: Device, model: nn.Module, **options: Any) -> Program:
    inputs = {"x": InputSpec(shape=("rows", 8), dtype=torch.float32)}
    return compile_with(model, device, inputs=inputs, buckets={"rows": [2, 4]}, cache=False, **options)


def test_alike_calls_of_all_layers_are_begun_once_for_each_bucket_before_anything_runs() -> None:
    ahead = Ahead()
    program = compiled(ahead.device(), Norms(0, 0, 0))
    assert ahead.events[0] == ("enter",) and ahead.events[-1] == ("leave",)
    assert sorted(ahead.begun()) == [("norm", (2, 8), (8, 1), 0, 0), ("norm", (4, 8), (8, 1), 0, 0)]
    report = program.report()
    assert (report.num_kernels, report.num_ahead) == (2, 2) and report.ahead_s >= 0 and not report.notes
    assert "kernels: 2 of 2 compiled ahead of the first run" in str(report)
    assert torch.equal(program(torch.ones(3, 8)), Norms(0, 0, 0)(torch.ones(3, 8)))


def test_a_tensor_that_begins_elsewhere_is_another_call() -> None:
    ahead = Ahead()
    compiled(ahead.device(), Norms(0, 1, 4))
    assert {event[-1] for event in ahead.begun()} == {0, 4} and len(ahead.begun()) == 4  # 4 elements are 16 bytes


@pytest.mark.parametrize("timed", [True, False])
def test_what_is_to_be_timed_is_begun_too(timed: bool) -> None:
    ahead = Ahead()
    second = OpImplementation(op=OP, name="other", fn=other, timed=lambda call: None if timed else "known to lose")
    compiled(ahead.device(NORM, second), Norms(0))
    assert {event[0] for event in ahead.begun()} == ({"norm", "other"} if timed else {"norm"})


def test_an_op_that_fails_is_noted_and_runs_as_ever() -> None:
    ahead = Ahead(fails=True)
    program = compiled(ahead.device(), Norms(0))
    (note,) = program.report().notes
    assert "norm are compiled when it first runs, not ahead: RuntimeError: no such instruction" in note
    assert program.report().num_ahead == 0 and "ahead of the first run" not in str(program.report())
    assert torch.equal(program(torch.ones(3, 8)), Norms(0)(torch.ones(3, 8)))


def test_nothing_is_begun_for_calls_that_no_implementation_takes() -> None:
    ahead = Ahead()
    refusing = replace(NORM, condition=lambda call: "not today")
    compiled(ahead.device(refusing), Norms(0))
    assert ahead.begun() == [] and ("leave",) in ahead.events


@pytest.mark.usefixtures("cache_folder")
def test_a_program_from_the_cache_begins_nothing() -> None:
    inputs = {"x": InputSpec(shape=("rows", 8), dtype=torch.float32)}
    begun = []
    for state in ("miss", "hit"):
        ahead = Ahead()
        program = compile_with(Norm(8).eval(), ahead.device(), inputs=inputs, buckets={"rows": [2]}, cache=True)
        assert program.report().cache.state == state, program.report().cache
        begun.append(len(ahead.begun()))
    assert begun == [1, 0]
