"""`core devices` and what all subcommands share: exit codes, JSON errors, --debug."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import core
from core.cli import main

InstallVendor = Callable[..., Any]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(arguments)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_json_has_the_documented_fields(install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str]) -> None:
    vendor = install_vendor()
    document = run_json(capsys, "devices", "--json")
    assert {key: document[key] for key in ("schema", "core", "warnings")} == {
        "schema": "core.devices/1",
        "core": core.__version__,
        "warnings": [],
    }
    devices = {item["device"]: item for item in document["devices"]}
    assert list(devices) == ["acme", "cpu", "cuda", "npu"]
    assert devices["acme"] == {
        "device": "acme",
        "plugin": {
            "distribution": "acme-device",
            "version": "1.0",
            "entry_point": f"{vendor.module}.plugin",
            "probe": f"{vendor.module}.probe:probe",
            "requires_core": ">=0.1",
            "in_tree": False,
        },
        "state": "available",
        "device_count": 2,
        "reason": "two Acme Ones",
        "hint": "",
    }


def test_the_table_shows_every_device_with_reason_and_hint(
    install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_vendor(
        probe="def probe():\n    return Probe(available=False, device_count=0, reason='[no] card', hint='buy')"
    )
    install_vendor(device="other", distribution="other-device", probe=None)
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "npu,typo")
    assert main(["devices"]) == 0
    out, err = capsys.readouterr()
    lines = {words[0]: words for line in out.splitlines() if (words := line.split())}
    assert lines["acme"] == ["acme", "unavailable", "0", "acme-device", "1.0"]
    assert "\n        [no] card\n        to do: buy\n" in out
    assert lines["other"][1:3] == ["available", "?"]
    assert lines["cpu"][1:3] == ["available", "1"]
    assert lines["npu"][1] == "blocked"
    assert "warning: CORE_PLUGINS_DISABLE names 'typo'" in err


def test_long_reasons_fit_a_page_of_80_columns_and_wrap_by_words(
    install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "the driver's library cannot be loaded: " + "no such file or directory; " * 6
    install_vendor(
        probe=f"def probe():\n    return Probe(available=False, device_count=0, reason={reason!r}, hint='x')"
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("acme")) + 1
    end = next(number for number, line in enumerate(lines) if line.endswith("to do: x"))
    assert max(map(len, lines)) <= 80 and end - start == 3
    assert " ".join(line.strip() for line in lines[start:end]) == reason.strip()


@pytest.mark.slow
def test_the_listing_is_quick_and_free_of_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from core.cli import main; code = main(['devices']);"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    commands = {"devices": code, "libraries": "import typer, rich.table"}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(3):  # in turns: other work on this machine slows both
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - start)
    # Less than 3 times what any such command takes to start, where torch alone is 11 to 18 times.
    assert min(seconds["devices"]) < 6 * min(seconds["libraries"])


@pytest.mark.slow
def test_it_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "core", "devices", "--json"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["schema"] == "core.devices/1"


def test_a_core_error_is_a_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORE_PROBE_TIMEOUT_S", "soon")
    assert main(["devices"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: CORE_PROBE_TIMEOUT_S='soon'\n  found: ") and "Traceback" not in err
    assert main(["devices", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_core_error_is_json_where_json_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORE_PROBE_TIMEOUT_S", "soon")
    document = run_json(capsys, "devices", "--json")
    assert document["schema"] == "core.error/1"
    assert document["error"]["type"] == "UsageError"
    assert set(document["error"]) == {"type", "asked", "found", "remedy", "notes"}


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--no-such-option"]) == 2
    assert "--no-such-option" in capsys.readouterr().err
    assert run_json(capsys, "devices", "--no-such-option", "--json")["error"]["type"] == "UsageError"
    assert main(["no-such-command"]) == 2


def test_an_internal_error_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("some\ndefect")

    monkeypatch.setattr("core.host.probing.DeviceScan", fail)
    assert main(["devices"]) == 1
    assert capsys.readouterr().err == "internal error: RuntimeError: some defect; run with --debug for the traceback\n"
    assert run_json(capsys, "devices", "--json")["error"]["type"] == "InternalError"


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    from core.cli import COMMANDS

    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS) and "--debug" in out


@pytest.mark.slow
def test_a_device_that_is_absent_exits_with_plugin_cause_and_remedy(tmp_path: Path) -> None:
    code = (
        "import sys, core, core.cli as cli;"
        "cli._run = lambda _: core.select_device('npu');"  # what any subcommand with --device does
        "sys.exit(cli.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: device 'npu:0'\n  found: ")
    assert "  to do: " in done.stderr and "raised by plugin core" in done.stderr and "Traceback" not in done.stderr
