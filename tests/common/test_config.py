"""core/common/config.py: options are parsed once and refused where this version lacks them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from core.common.config import CompileOptions
from core.errors import UsageError
from tests.support import refused

ALL = ("piecewise", "full", "compile", "segmented", "off")


def test_the_first_mode_that_this_version_has_is_preferred() -> None:
    options = CompileOptions()
    assert options.mode_of("decode", ("full", "off")) == "full"
    assert options.mode_of("decode", ("compile", "full")) == "compile"
    assert options.mode_of("decode", ALL) == "full"
    assert options.mode_of("decode", ("segmented",)) == "off"
    assert options.mode_of("decode", ()) == "off"


def test_one_mode_serves_all_phases_and_a_mapping_each() -> None:
    assert CompileOptions(mode="compile").mode_of("any", ALL) == "compile"
    options = CompileOptions(mode={"decode": "off"})
    assert options.mode_of("decode", ALL) == "off"
    assert options.mode_of("prefill", ALL) == "full"


def test_off_needs_no_support() -> None:
    assert CompileOptions(mode="off").mode_of("decode", ("full",)) == "off"


@pytest.mark.parametrize("mode", ["full", "piecewise", "segmented", "turbo"])
def test_a_mode_that_is_not_to_be_had_is_refused(mode: Any) -> None:
    with refused(UsageError, f"mode {mode!r} for phase 'decode'", "this version has: compile, off", "leave the mode"):
        CompileOptions(mode=mode).mode_of("decode", ("compile", "piecewise"))


def test_an_unknown_level_of_verification_is_refused() -> None:
    with refused(UsageError, "verify='maybe'", "no level of that name", "off, sample, full"):
        CompileOptions(verify="maybe")  # type: ignore[arg-type]


def test_options_are_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        CompileOptions().strict = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        CompileOptions("off")  # type: ignore[misc]
