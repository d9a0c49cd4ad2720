"""What capture refuses of its arguments: guards, break points, outputs, sentinels, values of a wrong kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.compilation.capture.inputs import BucketTable, InputSpec
from core.compilation.capture.watch import CompileWatch
from core.compilation.program import Program
from core.errors import UsageError
from tests.recording import acme
from tests.support import compile_with, refused

ROWS = {"x": InputSpec(("n", 4), torch.float32)}


class Tanh(nn.Module):
    """Calls torch by a function, by a method, by an op, and by functions that torch defines elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * 2) + 1
        x = x.sigmoid() + 1
        x = torch.ops.aten.sin.default(x) * 3
        return nn.functional.gelu(x + 1) - nn.functional.silu(x)


def guarded(x: Tensor, want: object = None) -> Tensor:
    return x + 1 if want in ("sums", True) else x * 2


def compiled(model: Callable[..., Any] = guarded, mode: Any = "full", **options: Any) -> Program:
    return compile_with(model, acme(), mode=mode, **{"inputs": ROWS, "buckets": [4], "passes": ()} | options)


def untouched(x: Tensor) -> Tensor:
    raise AssertionError("the model ran before its arguments were checked")


@pytest.mark.parametrize(
    ("values", "phrases"),
    [
        ((True, 1), ("guard 'want'", "True and 1 are equal", "values that differ")),
        ((2, 3, 2.0), ("2 and 2.0 are equal",)),
        (("sums", "sums"), ("'sums' and 'sums' are equal",)),
        ((["sums"],), ("guard 'want' with value ['sums']", "can't be hashed", "Python constants")),
        ("sums", ("a single string", "guards={'want': ('sums',)}")),
        ((torch.ones(2),), ("guard 'want'", "a Python constant")),
        (torch.ones(2), ("guard 'want'", "Python constants")),
        (("sums", torch.tensor(1)), ("a Python constant",)),
    ],
)
def test_values_of_guards_that_can_not_tell_graphs_apart_are_refused(values: Any, phrases: tuple[str, ...]) -> None:
    with refused(UsageError, *phrases):
        BucketTable.build(ROWS, [4], {"want": values})


@pytest.mark.parametrize(
    ("guards", "phrases"),
    [
        ("sums", ("guards='sums'", "a str", "a mapping")),
        (3, ("guards=3", "a int", "a mapping")),
        ({3: ("sums",)}, ("guard 3", "its name is no string")),
        ({"main": {"want": ("sums",)}, "want": ("sums",)}, ("guards for phases ['want']", "['main', 'next']")),
        ({"main": {"want": ("sums",)}, "next": ("sums",)}, ("some phases have a mapping", "leave the others out")),
    ],
)
def test_guards_are_a_mapping_by_name(guards: Any, phrases: tuple[str, ...]) -> None:
    with refused(UsageError, *phrases):
        BucketTable.build(ROWS, {"main": [4], "next": [4]}, guards)


@pytest.mark.parametrize("captured_first", [True, False])
def test_an_equal_guard_of_another_type_runs_no_other_graph(captured_first: bool) -> None:
    program = compiled(guards={"want": (True, False)})
    x = torch.ones(4, 4)
    if captured_first:  # the plan of a call is kept by its guards
        assert torch.equal(program(x=x, guards={"want": True}), x + 1)
    with refused(UsageError, "guard 'want' of 1, a int", "True, a bool", "guards={'want': True}"):
        program(x=x, guards={"want": 1})
    with refused(UsageError, "guard 'want' of 0.0, a float", "False, a bool"):
        program(x=x, guards={"want": 0.0})
    with refused(UsageError, "guard 'want'", "a Python constant"):
        program(x=x, guards={"want": torch.tensor(True)})
    assert torch.equal(program(x=x, guards={"want": False}), x * 2)


def test_a_guard_that_the_model_does_not_take_is_called_one() -> None:
    def model(x: Tensor) -> Tensor:
        return x

    with refused(UsageError, "the inputs 'x' and the guards 'want'", "a parameter 'want'", "leave the guard out"):
        compiled(model, guards={"want": ("sums",)})
    with refused(UsageError, "the inputs 'y' and the guards 'want'", "name the inputs as the model's forward"):
        compiled(inputs={"y": ROWS["x"]}, guards={"want": ("sums",)})


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "name",
    [
        "torch.tanh",
        "torch.Tensor.sigmoid",
        "aten::sin",
        "aten::sin.default",
        "torch.nn.functional.gelu",
        "torch._C._nn.gelu",
        "torch.nn.functional.silu",
    ],
)
def test_piecewise_cuts_at_what_torch_calls_so(name: str) -> None:
    model = Tanh()
    program = compiled(model, "piecewise", break_at=(name,))
    assert [(b.num_graphs, len(b.eager)) for b in program.report().buckets] == [(2, 1)]
    assert "graph_1()" in program.source(program.keys[0])
    for seed in range(2):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(program(x=x), model(x))


def test_a_break_point_that_is_in_no_graph_is_refused() -> None:
    names = ("torch.tanh, ", "aten::sin", "torch.nn.functional.gelu", "torch.Tensor.sigmoid")
    with refused(UsageError, "phase 'main'", "nothing named 'torch.tanhh', 'sin'", *names):
        compiled(Tanh(), "piecewise", break_at=("torch.tanhh", "aten::sin", "sin"))


def test_a_break_point_in_one_of_a_phase_s_graphs_is_enough_and_others_modes_need_none() -> None:
    def model(x: Tensor, want: str) -> Tensor:
        return torch.tanh(x) + 1 if want == "tanh" else torch.sin(x) + 1

    compiled(model, "piecewise", guards={"want": ("tanh", "sin")}, break_at=("torch.tanh",))
    compiled(model, "full", guards={"want": ("tanh", "sin")}, break_at=("torch.cos",))


def test_a_list_of_break_points_to_choose_from_is_short() -> None:
    def model(x: Tensor) -> Tensor:
        for name in ("sin", "cos", "tan", "exp", "log", "abs", "neg", "ceil", "floor", "round", "sign", "sqrt"):
            x = getattr(torch, name)(x)
        return x

    with pytest.raises(UsageError) as caught:
        compiled(model, "piecewise", break_at=("torch.sine",))
    remedy = caught.value.remedy
    assert remedy.count("torch.") == 10 and remedy.startswith("name what they call: torch.sin, ")


@pytest.mark.parametrize("mode", ["full", "piecewise", "segmented", "off"])
@pytest.mark.parametrize(
    ("argument", "phrases"),
    [
        ({"outputs": 3}, ("outputs=3", "a int", 'outputs=[("tokens", None)]')),
        ({"outputs": ("n", None)}, ("outputs=('n', None)", "one tuple of dimensions per output")),
        ({"outputs": [("m + 1", 4)]}, ("outputs=", "named 'm'", "the inputs' are: n")),
        ({"examples": 3}, ("examples=3", "a int", "a list of input sets")),
        ({"examples": {"main": 3}}, ("examples['main']=3", "a list of input sets")),
        ({"examples": {"main": {"x": torch.ones(4, 4)}}}, ("examples['main']", "a list of input sets")),
        ({"examples": [{"x": 3}]}, ("example input 'x'=3", "a tensor of torch.float32")),
        ({"progress": 3}, ("progress=3", "a function")),
        ({"reset": 3}, ("reset=3", "a function")),
        ({"bound": 3}, ("bound=3", "a mapping")),
    ],
)
def test_what_an_argument_can_not_be_is_said_before_any_work(
    mode: str, argument: dict[str, Any], phrases: tuple[str, ...]
) -> None:
    with refused(UsageError, *phrases):
        compiled(untouched, mode, **argument)


def test_a_bound_input_is_a_tensor() -> None:
    specs = {"x": InputSpec((4, 4), torch.float32, padding="bound")}
    with refused(UsageError, "bound=[]", "are: x", "options=core.CompileOptions(bound={name: tensor})"):
        compiled(untouched, inputs=specs, buckets=None)
    with refused(UsageError, "bound['x']=[", "a list", "the tensor itself"):
        compiled(untouched, inputs=specs, buckets=None, bound={"x": [torch.ones(4, 4)]})


def test_break_points_that_no_mode_uses_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    unused = "eager=('layer',) is not used: no phase runs 'segmented'"
    with caplog.at_level(logging.WARNING):
        program = compiled(mode="full", eager=("layer",))
    assert program.report().notes == (unused,)
    assert [(r.levelno, r.getMessage()) for r in caplog.records if "eager=" in r.getMessage()] == [
        (logging.WARNING, unused)
    ]
    assert compiled(mode="off", eager=("layer",)).report().notes == (unused,)
    assert compiled(mode="full", eager=()).report().notes == ()
    used = compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "segmented", eager=("0",), inputs=POSITIONAL)
    assert not any("is not used" in note for note in used.report().notes)


POSITIONAL = {"input": ROWS["x"]}


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int8, 700),
        (torch.int64, 0.5),
        (torch.int32, float("nan")),
        (torch.int64, float("inf")),
        (torch.uint8, -1),
        (torch.bool, 2),
        (torch.float16, 1e6),
        (torch.float32, 10**400),
        (torch.float32, "zero"),
    ],
)
def test_a_sentinel_is_a_number_of_its_dtype(dtype: torch.dtype, value: Any) -> None:
    with refused(UsageError, f"{dtype}, value={value!r}", "no number of that dtype"):
        InputSpec(("n",), dtype, padding="sentinel", value=value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int8, -128),
        (torch.int64, 7.0),
        (torch.bool, True),
        (torch.float16, float("-inf")),
        (torch.bfloat16, 0.1),
        (torch.float32, float("nan")),
    ],
)
def test_numbers_that_a_dtype_has_are_sentinels(dtype: torch.dtype, value: Any) -> None:
    written = InputSpec(("n",), dtype, padding="sentinel", value=value).padded(torch.zeros(1, dtype=dtype), {"n": 2})
    assert torch.equal(written[1:].isnan(), torch.tensor([value != value]))
    assert value != value or written[1] == torch.tensor(value, dtype=dtype)


@pytest.mark.parametrize("padding", ["zero", "edge", "keep", "copy", "bound"])
def test_only_a_sentinel_has_a_value(padding: Any) -> None:
    with refused(UsageError, f"padding={padding!r}, value=7", "only padding 'sentinel'", "add padding='sentinel'"):
        InputSpec((4,), torch.int64, padding=padding, value=7)


def test_serving_ends_after_torch_forgot_who_listens() -> None:
    watch = CompileWatch()
    with watch.watching():
        torch._dynamo.reset()
    with watch.watching():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert sum(watch.counts.values()) == 1
