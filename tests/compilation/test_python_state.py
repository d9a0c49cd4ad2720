"""Python state that a forward changes is refused for graphs: a program gives what the model gives, or is refused."""

from __future__ import annotations

import itertools
import logging
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import core
from core.device import Device
from core.errors import CaptureError, CoreError, TraceError
from tests.compilation.python_state import COUNTED, FORMS, Held, Model, Places, outputs, states
from tests.recording import acme
from tests.support import cpu, refused

INPUTS = {"x": core.InputSpec((2,), torch.float32)}
DEVICES = {"cpu": cpu, "acme": acme}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def compiled(model: Callable[..., Tensor], device: Device, **options: Any) -> core.Program:
    return core.compile(model, device, inputs=INPUTS, passes=(), lowering="inline", **options)


@pytest.mark.cases(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_a_program_of_a_model_with_python_state_gives_what_the_model_gives(form: str, device: str) -> None:
    expected = outputs(FORMS[form]())
    with compiled(FORMS[form](), DEVICES[device]()) as program:
        report = program.report()
        if device == "cpu" and form in COUNTED:
            assert report.modes == {"main": "compile"} and not report.notes
        else:
            assert report.modes == {"main": "off"} and "it can't be" in "".join(report.notes)
        assert outputs(program) == expected
        assert not program.report().fallbacks


@pytest.mark.cases(5)
@pytest.mark.parametrize("mode", ["full", "segmented"])
@pytest.mark.parametrize("form", FORMS)
def test_a_named_mode_refuses_python_state_and_leaves_it_as_it_was(form: str, mode: Any) -> None:
    expected, model = outputs(FORMS[form]()), FORMS[form]()
    with pytest.raises((TraceError, CaptureError)):
        compiled(model, acme(), mode=mode)
    assert outputs(model) == expected


@pytest.mark.parametrize("mode", ["full", "segmented"])
@pytest.mark.parametrize("form", FORMS)
def test_a_capture_without_a_trace_refuses_python_state_and_leaves_it_as_it_was(form: str, mode: Any) -> None:
    expected, model = outputs(FORMS[form]()), FORMS[form]()
    with pytest.raises(CaptureError, match="Python state"):
        core.capture(model, acme(), inputs=INPUTS, mode=mode)
    assert outputs(model) == expected


@pytest.mark.cases(5)
@pytest.mark.parametrize("form", sorted({*FORMS} - {*COUNTED}))
def test_strict_refuses_python_state(form: str) -> None:
    with pytest.raises(TraceError):
        compiled(FORMS[form](), cpu(), strict=True)


def test_the_refusal_names_object_attribute_and_line() -> None:
    model = nn.Sequential(nn.Identity(), Model(lambda s, x: _counts(s.cache, x), cache=Held(pos=0)))
    with refused(TraceError, "1.cache.pos", "attribute of a Held", "test_python_state.py", "cache.pos += 1"):
        compiled(_named(model), acme(), mode="full")
    with compiled(_named(model), acme()) as program:
        (note,) = program.report().notes
    assert "1.cache.pos" in note and "(test_python_state.py:" in note


def _counts(cache: Any, x: Tensor) -> Tensor:
    cache.pos += 1
    return x * cache.pos


def _named(model: nn.Sequential) -> nn.Module:
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]  # inputs go by name
    return model


def test_what_is_assigned_without_a_change_is_traced() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        before = s.box.n
        s.box.n = 5
        y = x * s.box.n
        s.box.n = before
        s.d["n"], s.l[0], s.t = 1, s.box, (2, s.box)
        s.box.shape = x.shape[0]
        return y

    box = Held(n=0, shape=2)
    model = Model(forward, box=box, d={"n": 1}, l=[box], t=(2, box))
    with compiled(model, cpu(), strict=True) as program:
        assert program.report().modes == {"main": "compile"}
        assert outputs(program) == [[5.0, 5.0]] * 5
    assert vars(box) == {"n": 0, "shape": 2} and model.l == [box]


@pytest.mark.parametrize("way", ["+=", "method", "out="])
def test_a_tensor_that_an_object_holds_may_be_written_in_place(way: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        if way == "+=":
            s.box.t += x
        elif way == "method":
            s.box.t = s.box.t.add_(x)
        else:
            s.box.t = torch.add(s.box.t, x, out=s.box.t)
        return s.box.t * 2

    held = torch.zeros(2)
    model = Model(forward, box=Held(t=held))
    with compiled(model, cpu(), strict=True) as program:
        assert model.box.t is held
        held.zero_()  # the capture has run it
        assert outputs(program) == [[2.0 * n] * 2 for n in (1, 2, 3, 4, 5)]
    assert model.box.t is held and held.tolist() == [5.0, 5.0]


def test_an_array_that_is_only_read_is_traced() -> None:
    model = Model(lambda s, x: x * torch.from_numpy(s.held) * s.scale, held=np.ones(2, np.float32), scale=np.float64(2))
    with compiled(model, cpu(), strict=True) as program:
        assert outputs(program, 1) == [[2.0, 2.0]]


def test_what_a_tool_that_rewrites_code_put_in_is_not_the_callables_state() -> None:
    code = _reads_tool.__code__.replace(co_names=("@tool", *_reads_tool.__code__.co_names[1:]))
    model = types.FunctionType(code, {"@tool": SimpleNamespace(factor=2, numbers=itertools.count())})
    program = core.capture(model, acme(), inputs={"x": core.InputSpec((4,), torch.float32)}, mode="full")
    assert torch.equal(program(x=torch.ones(4)), torch.full((4,), 2.0))


def _reads_tool(x: Tensor) -> Tensor:
    return x * _TOOL.factor


_TOOL = SimpleNamespace(factor=2)


def test_state_that_only_a_break_point_changes_is_its_own() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            return x * self.n

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = Counts()

        def forward(self, x: Tensor) -> Tensor:
            return self.counts(x + 1) * 2

    model = Outer().eval()
    with core.capture(
        model, acme(), inputs=INPUTS, mode="segmented", options=core.CompileOptions(eager=("counts",))
    ) as program:
        model.counts.n = 0
        assert outputs(program) == [[4.0 * n] * 2 for n in (1, 2, 3, 4, 5)]
    with refused(CaptureError, "counts.n", "eager="):
        core.capture(model, acme(), inputs=INPUTS, mode="segmented", options=core.CompileOptions(eager=()))


def test_what_is_set_up_at_the_first_run_is_captured_after_one() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        if s.table is None:
            s.table = torch.arange(2.0)
        return x + s.table

    model = Model(forward, table=None)
    with refused(CaptureError, "table", "run the model a first time"):
        core.capture(model, acme(), inputs=INPUTS, mode="full")
    assert model.table is None
    outputs(model, 1)
    for make in (core.capture, core.compile):
        with make(model, acme(), inputs=INPUTS, mode="full") as program:
            assert outputs(program, 2) == [[1.0, 2.0]] * 2


def _agrees(seed: int, device: Device, **options: Any) -> bool:
    """Compare a program of a model drawn by chance with the model; return whether it was refused."""
    expected, model = outputs(Places(seed)), Places(seed)
    before = list(states(model))
    try:
        program = core.compile(model, device, inputs=INPUTS, passes=(), lowering="inline", **options)
    except CoreError:
        assert list(states(model)) == before
        return True
    with program:
        assert list(states(model)) == before
        assert outputs(program) == expected, seed
    return False


SEEDS = [pytest.param(seed, marks=[pytest.mark.exhaustive] if seed >= 20 else []) for seed in range(200)]


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_state_at_a_place_drawn_by_chance_is_never_wrong(seed: int) -> None:
    assert not _agrees(seed, cpu())
    keeps = list(states(model := Places(seed)))
    outputs(model)
    keeps_state = keeps != list(states(model))
    assert keeps_state or not _agrees(seed, cpu(), mode="compile")
    for mode in ("full", "segmented"):
        assert _agrees(seed, acme(), mode=mode) == keeps_state


def test_an_attribute_that_a_forward_makes_and_deletes_is_no_state() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.box.last = x * 2
        found = s.box.last + 1
        del s.box.last
        return found

    model = Model(forward, box=Held())
    with compiled(model, acme(), mode="full") as program:
        assert outputs(program) == outputs(model)
