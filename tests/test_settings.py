"""core/settings.py: parsing and refusing `CORE_*` variables."""

from __future__ import annotations

import pytest

from core.errors import UsageError
from core.settings import Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_environment({})
    assert settings.accelerator_graphs == "recorded"
    assert settings == Settings(plugins=None, plugins_disabled=(), probe_timeout_s=5.0, warnings=())


def test_lists_are_split_and_normalised() -> None:
    settings = Settings.from_environment({"CORE_PLUGINS": "Acme_Device, other", "CORE_PLUGINS_DISABLE": "core:cuda"})
    assert settings.plugins == ("acme-device", "other")
    assert settings.plugins_disabled == ("core:cuda",)


def test_an_empty_allow_list_differs_from_an_unset_one() -> None:
    assert Settings.from_environment({"CORE_PLUGINS": ""}).plugins == ()


@pytest.mark.parametrize("variable", ["CORE_PLUGINS", "CORE_PLUGINS_DISABLE"])
def test_an_empty_name_in_a_list_is_refused(variable: str) -> None:
    with pytest.raises(UsageError, match=rf"{variable}='a,,b'"):
        Settings.from_environment({variable: "a,,b"})


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_timeout_that_is_no_positive_number_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="CORE_PROBE_TIMEOUT_S"):
        Settings.from_environment({"CORE_PROBE_TIMEOUT_S": value})


def test_a_timeout_is_read_in_seconds() -> None:
    assert Settings.from_environment({"CORE_PROBE_TIMEOUT_S": "0.5"}).probe_timeout_s == 0.5


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("CORE_PLUGIN", "CORE_PLUGINS"), ("CORE_PROBE_TIMEOUT", "CORE_PROBE_TIMEOUT_S")],
)
def test_a_misspelt_variable_is_warned_about(misspelt: str, meant: str) -> None:
    (warning,) = Settings.from_environment({misspelt: "x"}).warnings
    assert misspelt in warning and meant in warning


def test_an_unrelated_variable_is_not_warned_about() -> None:
    assert Settings.from_environment({"CORE_DUMP_FOLDER": "x", "HOME": "y"}).warnings == ()


def test_how_generic_devices_capture_is_one_of_two() -> None:
    assert Settings.from_environment({"CORE_ACCELERATOR_GRAPHS": "torch"}).accelerator_graphs == "torch"
    with pytest.raises(UsageError, match="not recorded or torch"):
        Settings.from_environment({"CORE_ACCELERATOR_GRAPHS": "Torch"})


@pytest.fixture(scope="module")
def of_a_module() -> Settings:
    return Settings.from_environment()


def test_what_a_module_makes_for_its_tests_leaves_the_users_compile_cache_alone(of_a_module: Settings) -> None:
    assert of_a_module.cache is False
