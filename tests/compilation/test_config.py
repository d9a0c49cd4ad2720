"""core/compilation/options.py: options are parsed once and refused where a device lacks them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from core.compilation.options import CompileOptions
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
