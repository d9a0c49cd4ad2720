"""The short form of core.compile and of calls: inputs by examples and by place, dimensions named as by torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core import InputSpec, Program
from core.errors import CaptureError, UsageError
from tests.support import refused


class Model(nn.Module):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = torch.tanh(x) * 2
        return x if scale is None else x * scale


def compiled(model: Any = None, *args: Any, **options: Any) -> Program:
    return core.compile(model or Model().eval(), "cpu", *args, lowering="inline", **options)


X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.mark.cases(3)
@pytest.mark.parametrize("dim", ["batch", torch.export.Dim("batch")], ids=["text", "Dim"])
@pytest.mark.parametrize(
    "shorter",
    [lambda d: {"x": {0: d}}, lambda d: ({0: d},), lambda d: {"x": (d, None)}, lambda d: {"x": {-2: d}, "scale": None}],
)
def test_examples_declare_shapes_and_dimensions(dim: Any, shorter: Any) -> None:
    scale = torch.full((4,), 3.0)
    program = compiled(example_inputs=(X, scale), dynamic=shorter(dim), buckets=[2, 8])
    assert [str(key) for key in program.keys] == ["main[8]", "main[2]"]
    assert torch.equal(program(X, scale), Model()(X, scale))
    assert torch.equal(program(X[:1], scale=scale), Model()(X[:1], scale))
    assert torch.equal(program("main", X, scale), Model()(X, scale))


@pytest.mark.parametrize(
    "given",
    [{"inputs": [X]}, {"inputs": {"x": X}}, {"example_inputs": {"x": X}}, {"example_inputs": X}, {"inputs": X}],
)
def test_without_names_every_size_is_fixed(given: Any) -> None:
    program = compiled(**given)
    assert torch.equal(program(X), Model()(X))
    with refused(UsageError, "declares (3, 4)"):
        program(X[:2])


def test_declarations_by_place() -> None:
    program = compiled(inputs=[InputSpec(("n", 4), torch.float32)], buckets=[4])
    assert torch.equal(program(X), Model()(X))


@pytest.mark.parametrize("named", [{"model": {"n": Model()}}, {"mode": {"n": "compile"}}], ids=["models", "modes"])
def test_buckets_of_a_phase_with_the_name_of_the_dimension(named: dict[str, Any]) -> None:
    options = {"model": Model(), "inputs": {"x": InputSpec(("n", 4), torch.float32)}, "buckets": {"n": [2, 4]}}
    assert [str(key) for key in sorted(compiled(**options | named).keys, key=str)] == ["n[2]", "n[4]"]
    assert {key.phase for key in compiled(**options).keys} == {"main"}


def test_buckets_by_dimension_are_combined() -> None:
    program = compiled(
        lambda x: x.tanh(), example_inputs=(X,), dynamic={"x": {0: "n", 1: "width"}}, buckets={"n": [2, 4], "width": 4}
    )
    assert sorted(str(key) for key in program.keys) == ["main[2, 4]", "main[4, 4]"]
    assert torch.equal(program(X), X.tanh())


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cpu", 0), core.select_device("cpu")], ids=str)
def test_a_device_may_be_an_object(device: Any) -> None:
    program = core.compile(Model().eval(), device, example_inputs=(X,), options={"lowering": "inline"})
    assert torch.equal(program(X), Model()(X))


def test_a_device_is_no_number() -> None:
    with refused(UsageError, "device 0", "a torch.device"):
        core.select_device(0)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"inputs": [X]}, {"example_inputs": (X,)}])
def test_a_callable_is_captured_with_the_same_inputs(given: Any) -> None:
    program = core.capture(Model().eval(), "cpu", **given)
    assert torch.equal(program(X), Model()(X))
    with refused(UsageError, "core.capture without inputs"):
        core.capture(Model().eval(), "cpu")


def test_without_buckets_the_example_is_one_and_larger_batches_are_split() -> None:
    program = compiled(example_inputs=(X,), dynamic={"x": {0: "batch"}})
    x = torch.randn(8, 4)
    assert torch.equal(program(x), Model()(x))
    report = program.report()
    assert report.oversized == {"main: larger than main[3], split into calls that fit": 1}
    assert sum(report.replays.values()) == 3 and not report.fallbacks


def test_other_dimensions_are_not_split_unasked() -> None:
    program = compiled(example_inputs=(X,), dynamic={"x": {0: "tokens"}})
    x = torch.randn(8, 4)
    assert torch.equal(program(x), Model()(x))
    assert not sum(program.report().replays.values()) and sum(program.report().fallbacks.values()) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_batch_whose_outputs_can_not_be_joined(strict: bool) -> None:
    program = compiled(lambda x: x.sum(0), example_inputs=(X,), dynamic={"x": {0: "batch"}}, strict=strict)
    x = torch.randn(8, 4)
    if strict:
        with refused(CaptureError, "output 0 has no dimension of entries", "a larger bucket"):
            program(x)
    else:
        assert torch.equal(program(x), x.sum(0))
        (why,) = program.report().fallbacks
        assert "no dimension of entries" in why


def test_verify_takes_the_examples() -> None:
    program = compiled(
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
        example_inputs=(torch.randn(32, 16),),
        verify="full",
    )
    (trace,) = program.report().traces
    assert [each.verification for each in trace.passes if each.name == "lift_rms_norm"] == ["verified"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "without inputs"),
        ({"inputs": [X], "example_inputs": [X]}, "both say"),
        ({"example_inputs": 3}, r"write (x,)"),
        ({"example_inputs": (X,), "dynamic": {"x": {0: torch.export.Dim.DYNAMIC}}}, "no name of a dimension"),
        ({"example_inputs": (X,), "dynamic": {"x": {0: "n"}}, "buckets": "8,16"}, "not a list"),
        ({"example_inputs": (X,), "dynamic": {"x": {0: "n"}}, "buckets": [0]}, "a whole number above 0"),
        ({"example_inputs": (X,), "dynamic": {"x": {0: "n"}}, "buckets": {"n": "8"}}, "buckets={'n': [1, 8]}"),
        ({"example_inputs": (X,), "options": {"lowring": "inline"}}, "did you mean 'lowering'"),
        ({"example_inputs": (X,), "options": {"debug": "yes"}}, "give bool"),
        ({"example_inputs": (X,), "options": 3}, "core.CompileOptions(…)"),
        ({"example_inputs": (X,), "model": Model}, "a class, not an instance"),
        ({"example_inputs": (X,), "model": "Model"}, "can't be called"),
        ({"example_inputs": (X,), "model": torch.tanh}, "a mapping by name, or wrap it"),
        ({"example_inputs": (X, X, X)}, "the model takes 2 of them: x, scale"),
        ({"example_inputs": (X, 3.0)}, "example input 'scale'"),
        ({"example_inputs": (X,), "dynamic": {"y": {0: "batch"}}}, "the inputs are x"),
        ({"example_inputs": (X,), "dynamic": {"x": {2: "batch"}}}, "its example has 2 dimensions"),
        ({"example_inputs": (X,), "dynamic": {"x": 0}}, "a int"),
        ({"example_inputs": (X,), "dynamic": "batch"}, "a str"),
        (
            {"inputs": {"x": InputSpec((3, 4), torch.float32)}, "dynamic": {"x": {0: "n"}}},
            "names its dimensions itself",
        ),
    ],
)
def test_what_is_refused_says_what_to_write(given: Any, told: str) -> None:
    with refused(UsageError, told):
        compiled(**given)


def test_calls_by_place_are_checked() -> None:
    program = compiled(example_inputs=(X,))
    with refused(UsageError, "2 inputs by place", "it declares x"):
        program(X, X)
    with refused(UsageError, "'x' is given by name too"):
        program(X, x=X)
    with refused(UsageError, "input 'x'", "a int"):
        program(3)  # type: ignore[arg-type]


def test_what_to_write_names_an_input_that_the_model_has() -> None:
    with refused(UsageError, "dynamic={'x': {0: 'batch'}}"):
        compiled(lambda x: x, example_inputs=(X,), dynamic={"hidden": {0: "batch"}})
    with refused(UsageError, "dynamic={'states': {0: 'batch'}}"):
        compiled(lambda states: states, example_inputs=(X,), dynamic={"x": {0: "batch"}})
