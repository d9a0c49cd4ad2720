"""core/compilation/oversized.py: calls larger than any bucket run eagerly, are split or refused, and are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core import InputSpec, Program
from core.errors import CaptureError, UsageError
from tests.recording import acme
from tests.support import Block, compile_with, cpu, refused

ROWS = {"x": InputSpec(("n", 2), torch.float32)}


def compiled(
    model: Callable[..., Any], inputs: Mapping[str, InputSpec] = ROWS, buckets: Any = (2, 4), **options: Any
) -> Program:
    device = options.pop("device", None) or cpu()
    return compile_with(model, device, inputs=inputs, buckets=list(buckets), lowering="inline", **options)


def rows(count: int, width: int = 2) -> Tensor:
    return torch.arange(1.0, count * width + 1).view(count, width)


def double(x: Tensor) -> Tensor:
    return x * 2


def test_eager_calls_are_counted_at_each_call(caplog: pytest.LogCaptureFixture) -> None:
    program = compiled(double)
    with caplog.at_level(logging.WARNING, "core.compilation.program"):
        for count in (5, 9, 5, 4):
            assert torch.equal(program(x=rows(count)), rows(count) * 2)
    assert len([each for each in caplog.records if each.name == "core.compilation.program"]) == 1
    report = program.report()
    (what,) = report.oversized
    assert report.oversized[what] == 3 == sum(report.fallbacks.values())
    assert what == "main: no bucket is that large; the largest is main[4]: run eagerly"
    assert f"3 oversized calls: {what}" in str(report)
    assert report.to_json()["oversized"] == {what: 3}


def test_an_error_by_choice() -> None:
    program = compiled(double, oversized="error")
    with refused(CaptureError, "n = 5", "the largest is main[4]", "oversized='split'"):
        program(x=rows(5))
    assert torch.equal(program(x=rows(4)), rows(4) * 2)
    assert not program.report().oversized and not program.report().fallbacks


@pytest.mark.cases(2)
@pytest.mark.parametrize("device", [cpu, acme], ids=["cpu", "acme"])
@pytest.mark.parametrize("count", [5, 8, 11])
def test_split_calls_are_the_whole_call_by_replays_alone(device: Any, count: int) -> None:
    model = Block()
    program = compiled(model, {"x": InputSpec(("n", 16), torch.float32)}, oversized="split", device=device())
    x = rows(count, 16) / 99
    found = program(x=x)
    kept = found.clone()
    program(x=-x)
    assert torch.equal(found, kept)  # no view of what the next call overwrites
    with torch.no_grad():
        torch.testing.assert_close(found, model(x))
    report = program.report()
    assert report.oversized == {"main: larger than main[4], split into calls that fit": 2}
    assert not report.fallbacks and sum(report.replays.values()) == 2 * -(-count // 4)


def several(x: Tensor, scale: Tensor, at: Tensor) -> dict[str, Any]:
    return {"x": x, "turned": (x * scale).T, "places": at + 1, "twice": [x + x, 7]}


def test_any_structure_is_joined_along_the_dimension_of_entries() -> None:
    specs = {**ROWS, "scale": InputSpec((2,), torch.float32), "at": InputSpec(("n",), torch.int64)}
    program = compiled(several, specs, oversized="split", strict=True)
    inputs = {"x": rows(7), "scale": torch.tensor([2.0, 3.0]), "at": torch.arange(7)}
    found, wanted = program(**inputs), several(**inputs)
    assert found["x"] is inputs["x"] and found["twice"][1] == 7
    for ours, theirs in ((found["turned"], wanted["turned"]), (found["places"], wanted["places"])):
        assert torch.equal(ours, theirs)
    assert torch.equal(found["twice"][0], wanted["twice"][0])


def test_a_captured_callable_is_split_by_its_declared_outputs() -> None:
    options = core.CompileOptions(oversized="split", outputs=[("n", None)])
    program = core.capture(double, cpu(), inputs=ROWS, buckets=[4], options=options)
    assert torch.equal(program(x=rows(9)), rows(9) * 2)


@pytest.mark.parametrize(
    ("model", "phrase"),
    [
        (lambda x: x.sum(0), "output 0 has no dimension of entries"),
        (lambda x: (x, x @ x.T), "output 0 relates entries to each other"),
    ],
)
def test_outputs_that_can_not_be_joined_are_refused(model: Any, phrase: str) -> None:
    program = compiled(model, oversized="split")
    with refused(CaptureError, "splitting a call over main[4]", phrase, 'oversized="eager"'):
        program(x=rows(5))


@pytest.mark.parametrize(
    ("inputs", "buckets", "phrase"),
    [
        ({"x": InputSpec(("n", "m"), torch.float32)}, [{"n": 2, "m": 2}], "the bucket dimensions are: n, m"),
        ({"x": InputSpec((2, 2), torch.float32)}, [{}], "the bucket dimensions are: none"),
        ({"x": InputSpec(("n", "n"), torch.float32)}, [2, 4], "input 'x' of shape ('n', 'n') relates entries"),
        ({"x": InputSpec(("n + 1",), torch.float32)}, [2, 4], "input 'x' of shape ('n + 1',) relates entries"),
    ],
)
def test_declarations_that_can_not_be_split_are_refused_at_compile(inputs: Any, buckets: Any, phrase: str) -> None:
    with refused(UsageError, "oversized='split'", phrase, "oversized='eager'"):
        compiled(double, inputs, buckets, oversized="split")


def test_one_entry_to_a_bucket_tells_nothing() -> None:
    program = compiled(double, buckets=[1], oversized="split")
    with refused(CaptureError, "splitting a call over main[1]", "one entry to a bucket", "larger bucket"):
        program(x=rows(3))


def test_split_and_serialised_together() -> None:
    program = compiled(double, oversized="split", threads="serialize")
    assert torch.equal(program(x=rows(9)), rows(9) * 2)


class Dropping(nn.Module):
    """Drops out by a function, as attention layers of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def test_an_eager_call_in_training_mode_is_refused() -> None:
    model = nn.Sequential(Dropping()).eval()
    program = compiled(model, {"input": ROWS["x"]})
    assert torch.equal(program(input=rows(5)), rows(5))
    model.train()
    with refused(UsageError, "running phase 'main' of Sequential eagerly", "training mode", "model.eval() again"):
        program(input=rows(5))
    assert torch.equal(program(input=rows(3)), rows(3))  # captured in evaluation mode
    model.eval()[0].train()
    with refused(UsageError, "0 was put in training mode"):
        program(input=rows(5))
    model.eval()
    assert torch.equal(program(input=rows(5)), rows(5))
    assert sum(program.report().oversized.values()) == 2


def test_a_model_that_was_never_in_evaluation_mode_runs_on() -> None:
    program = compiled(nn.Linear(2, 2), {"input": ROWS["x"]})
    assert program(input=rows(5)).shape == (5, 2)
