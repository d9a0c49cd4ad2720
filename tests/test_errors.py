"""Errors that say whose fault it is: here, a torch that cannot be imported for another device's backend."""

from __future__ import annotations

import pytest
import torch

from core import cli
from core.errors import DeviceUnavailableError, ModelError, broken_extension, is_out_of_memory

TEXT = "Failed to load the backend extension: torch_dev. You can disable extension auto-loading with TORCH_…=0."


def fault() -> RuntimeError:
    error = RuntimeError(TEXT)
    error.__cause__ = ImportError("libdev.so: cannot open shared object file")
    return error


def test_a_backend_that_breaks_torch_is_named_with_its_cause_and_the_way_out() -> None:
    error = broken_extension("device 'x'", fault())
    assert isinstance(error, DeviceUnavailableError) and error.asked == "device 'x'"
    assert "torch_dev is installed and fails: libdev.so: cannot open" in error.found
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in error.remedy and "uninstall torch_dev" in error.remedy
    assert "no reason is given" in str(broken_extension("x", RuntimeError(TEXT)))


@pytest.mark.parametrize("error", [RuntimeError("Failed to load"), ImportError("torch"), ValueError()])
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert broken_extension("x", error) is None


def test_the_command_line_calls_it_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: list[str]) -> int:
        raise fault()

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["run", "--device", "cpu"]) == cli.EXIT_USER
    text = capsys.readouterr().err
    assert text.startswith("error: core run --device cpu") and "internal" not in text


def test_memory_that_ran_out_is_known_by_type_or_words_also_of_a_cause() -> None:
    with pytest.raises(RuntimeError) as caught:  # no type of its own on the processor
        torch.empty(1 << 50, dtype=torch.uint8)
    wrapped = ModelError("load it", found="it failed", remedy="see above")
    wrapped.__cause__ = caught.value
    for error in (
        caught.value,
        wrapped,
        MemoryError(),
        torch.OutOfMemoryError("x"),
        OSError(12, "Cannot allocate memory"),
    ):
        assert is_out_of_memory(error), error
    assert not is_out_of_memory(ValueError("no")) and not is_out_of_memory(None)
