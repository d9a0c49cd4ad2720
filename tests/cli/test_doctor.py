"""`core doctor`: which plugins it calls broken, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import core
from core.cli import main

InstallVendor = Callable[..., Any]

OPENS = "@hookimpl\ndef core_open_device(context):\n    return parts()\n"
UNAVAILABLE = (
    "@hookimpl\ndef core_open_device(context):\n"
    "    raise DeviceUnavailableError('device', found='card is asleep', remedy='wake it')\n"
)
NO_CARD = "def probe():\n    return Probe(available=False, device_count=0, reason='no card')\n"


@pytest.fixture(autouse=True)
def _only_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each plugin opened costs an import of torch in a process of its own.
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "core")


def examine(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return exit code, the plugins by device name, and the whole document."""
    code = main(["doctor", "--json", *options])
    document = json.loads(capsys.readouterr().out)
    return code, {item["device"]: item for item in document["plugins"]}, document


@pytest.mark.slow
def test_a_working_plugin_passes(install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str]) -> None:
    install_vendor()
    code, plugins, document = examine(capsys)
    assert code == 0
    assert (plugins["acme"]["verdict"], plugins["acme"]["detail"]) == ("pass", "Acme One")
    assert plugins["cpu"]["verdict"] == "skipped"
    assert document["schema"] == "core.doctor/1" and document["warnings"] == []
    assert document["versions"]["core"] == core.__version__
    assert set(document["versions"]) == {"python", "core", "torch", "pluggy", "transformers"}


@pytest.mark.slow
def test_an_absent_device_is_no_failure(install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str]) -> None:
    install_vendor(plugin=UNAVAILABLE, probe=NO_CARD)
    code, plugins, _ = examine(capsys)
    assert code == 0
    assert (plugins["acme"]["verdict"], plugins["acme"]["detail"]) == ("unavailable", "card is asleep")
    assert plugins["acme"]["hint"] == "wake it" and plugins["acme"]["traceback"] == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vendor", "detail"),
    [
        pytest.param({"plugin": "1 / 0", "probe": NO_CARD}, "ZeroDivisionError", marks=pytest.mark.slow),
        pytest.param({"plugin": UNAVAILABLE}, "card is asleep", marks=pytest.mark.slow),
        pytest.param({"probe": "import os\ndef probe(): os.abort()"}, "crashed with SIGABRT", marks=pytest.mark.slow),
        ({"plugin": "import os\nos.abort()"}, "opening it crashed with SIGABRT"),
        ({"requires": ("core>=99",)}, "it requires core >=99"),
    ],
)
def test_a_broken_plugin_fails_with_its_cause(
    install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str], vendor: dict[str, Any], detail: str
) -> None:
    install_vendor(**vendor)
    code, plugins, _ = examine(capsys)
    assert code == 1
    assert plugins["acme"]["verdict"] == "fail" and detail in plugins["acme"]["detail"]


def test_a_plugin_that_hangs_is_killed(install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str]) -> None:
    install_vendor(plugin="import time\ntime.sleep(60)")
    code, plugins, _ = examine(capsys, "--timeout-s", "1")
    assert code == 1
    assert "gave no answer within 1 s and was killed" in plugins["acme"]["detail"]


@pytest.mark.slow
def test_the_text_shows_the_traceback_and_warns_about_a_heavy_probe(
    install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str]
) -> None:
    install_vendor(plugin="1 / 0", probe="import sys\nsys.modules['torch'] = sys\n" + NO_CARD)
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("python ") and "| ZeroDivisionError: division by zero" in out
    assert "the probe of plugin acme-device 1.0 imports torch" in err
