"""`core run` refuses wrong values of options before it loads anything."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.cli import main
from core.errors import DeviceUnavailableError


@pytest.fixture(autouse=True)
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a model is loaded or built."""

    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("the model was loaded")

    # What both loading and building begin with, looked up at each call: no other module keeps the replacement.
    monkeypatch.setattr("core.engine.models.loading._check_dtype", load)


@pytest.mark.cases(5)
@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        ("--verify foo", ("--verify foo", "off, sample, full")),
        ("--mode bogus", ("--mode bogus", "full, piecewise, segmented, compile, off")),
        ("--mode decode=bogus", ("--mode bogus", "full, piecewise, segmented, compile, off")),
        ("--mode decoding=off", ("mode={'decoding': 'off'}", "'decode'", "'prefill'")),
        ("--mode full", ("mode 'full'", "this device has: compile, off")),
        ("--mode prefill=full", ("mode 'full' for phase 'prefill'", "this device has: compile, off")),
        ("--speculative -1", ("speculative=-1", "at least 0")),
        ("--draft-model /nowhere --speculative 2", ("load model '/nowhere'", "no such folder")),
        ("--lowering bogus", ("lowering 'bogus'", "inline")),
        ("--kv-cache-dtype fp9", ("--kv-cache-dtype fp9", "auto, fp8")),
    ],
)
def test_a_wrong_value_is_refused_first(
    command: str, arguments: str, phrases: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "bench" and arguments.startswith("--verify"):
        pytest.skip("bench has no such option")
    sizes = ["--preset", "tiny-llama", "--context", "16", "--prefill", "8"] if command == "bench" else []
    assert main([command, "--device", "cpu", *sizes, *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert all(phrase in err for phrase in phrases) and "to do:" in err, err


@pytest.mark.parametrize("command", ["run", "serve"])
def test_the_collector_rests_until_the_model_is_there(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    seen = []

    def select(name: str) -> None:
        seen.append(gc.isenabled())
        raise DeviceUnavailableError("a device", found="a test", remedy="none")

    monkeypatch.setattr("core.host.selection.select_device", select)
    arguments = ["--port", "0"] if command == "serve" else []
    assert main([command, "--device", "cpu", *arguments]) == 2
    assert seen == [False] and gc.isenabled()
