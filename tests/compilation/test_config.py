"""core/compilation/options.py: options are parsed once and refused where a device lacks them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import core
from core.compilation.options import CompileOptions, options_of
from core.device import Mode
from core.errors import UsageError
from tests.support import refused

ALL: tuple[Mode, ...] = ("piecewise", "full", "compile", "segmented")


def test_without_a_choice_all_of_the_devices_modes_may_serve_and_eager_in_the_end() -> None:
    options = CompileOptions()
    assert options.modes_of("decode", ALL) == (*ALL, "off")
    assert options.modes_of("decode", ("full", "off")) == ("full", "off")
    assert options.modes_of("decode", ()) == ("off",)


def test_one_mode_serves_all_phases_and_a_mapping_each() -> None:
    assert CompileOptions(mode="compile").modes_of("any", ALL) == ("compile",)
    options = CompileOptions(mode={"decode": "off"})
    assert options.modes_of("decode", ALL) == ("off",)
    assert options.modes_of("prefill", ALL) == (*ALL, "off")


def test_of_several_modes_those_that_the_device_has_are_taken_in_their_order() -> None:
    options = CompileOptions(mode={"prefill": ("segmented", "turbo", "off")})  # type: ignore[dict-item]
    with refused(UsageError, "'turbo'", "for phase 'prefill'"):
        options.modes_of("prefill", ALL)
    options = CompileOptions(mode=("segmented", "full", "off"))
    assert options.modes_of("prefill", ALL) == ("segmented", "full", "off")
    assert options.modes_of("prefill", ("full",)) == ("full", "off")
    with refused(UsageError, "mode ('segmented', 'full')", "this device has: compile, off"):
        CompileOptions(mode=("segmented", "full")).modes_of("prefill", ("compile",))


def test_off_needs_no_support() -> None:
    assert CompileOptions(mode="off").modes_of("decode", ("full",)) == ("off",)


@pytest.mark.parametrize("mode", ["full", "segmented", "turbo"])
def test_a_mode_that_is_not_to_be_had_is_refused(mode: Any) -> None:
    phrases = (f"mode {mode!r} for phase 'decode'", "this device has: compile, piecewise, off", "leave the mode")
    with refused(UsageError, *phrases):
        CompileOptions(mode=mode).modes_of("decode", ("compile", "piecewise"))


def test_an_unknown_level_of_verification_is_refused() -> None:
    with refused(UsageError, "verify='maybe'", "no level of that name", "off, sample, full"):
        CompileOptions(verify="maybe")  # type: ignore[arg-type]


def test_options_are_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        CompileOptions().strict = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        CompileOptions("off")  # type: ignore[misc]


def double(x: Tensor) -> Tensor:
    return x * 2


ROWS = {"x": core.InputSpec((4,), torch.float32)}


@pytest.mark.parametrize(("door", "most"), [(core.compile, 12), (core.capture, 9)])
def test_the_doors_take_few_arguments_and_the_rest_as_options(door: Callable[..., Any], most: int) -> None:
    parameters = inspect.signature(door).parameters
    assert len(parameters) <= most
    own = parameters.keys() - {
        "model",
        "function",
        "device",
        "inputs",
        "example_inputs",
        "dynamic",
        "buckets",
        "options",
    }
    assert own <= {field.name for field in fields(CompileOptions)}


@pytest.mark.parametrize("name", ["mode", "lowering", "passes", "strict", "verify"])
def test_an_option_has_one_meaning_given_directly_or_among_the_options(name: str) -> None:
    values = {"mode": "off", "lowering": "inline", "passes": ("lift_rotary",), "strict": True, "verify": "full"}
    assert options_of(None, **{name: values[name]}) == CompileOptions(**{name: values[name]})
    given = CompileOptions(debug=True, **{name: values[name]})
    assert options_of(given) == given == options_of(given, **{name: None})
    said = f"{name}={values[name]!r}"
    with refused(UsageError, said, f"options=CompileOptions(…) says {said} as well", "in one place"):
        options_of(given, **{name: values[name]})


def test_an_option_in_both_places_is_refused_though_one_says_the_default() -> None:
    options = CompileOptions(strict=True, reset=lambda: None, bound={"x": torch.ones(4)})
    with refused(UsageError, "strict=False", "says strict=True as well"):
        core.compile(double, "cpu", inputs=ROWS, strict=False, options=options)
    assert options.stated == ("strict", "bound", "reset")


def test_options_of_another_kind_are_refused() -> None:
    with refused(UsageError, "options=True", "neither a core.CompileOptions nor a mapping"):
        core.compile(double, "cpu", inputs=ROWS, options=True)  # type: ignore[arg-type]
    with refused(UsageError, "passes='lift_rotary'", "a single string"):
        core.compile(double, "cpu", inputs=ROWS, passes="lift_rotary")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"lowering": "inline"},
        {"passes": ()},
        {"enable_passes": ("merge_linears",)},
        {"break_at": ("torch.tanh",)},
        {"verify": "full"},
        {"cache": True},
    ],
)
def test_capture_refuses_what_only_a_trace_has(options: dict[str, Any]) -> None:
    (name,) = options
    with refused(UsageError, f"core.capture with {name}", "it traces nothing", "core.compile"):
        core.capture(double, "cpu", inputs=ROWS, options=CompileOptions(**options))
