"""core/cli/output.py: JSON is strict, and tables are as wide as they may be; the root command's own options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from core._version import __version__
from core.cli import COMMANDS, main, output
from core.cli.output import console, loading, print_core_error, print_json, status
from core.errors import UsageError


def test_numbers_that_json_has_not_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    inf = float("inf")
    print_json("test/1", ratio=inf, nested={"list": [1.5, float("nan"), -inf], "pair": (2, inf)}, text="NaN", flag=True)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    del document["core"]
    assert document == {
        "schema": "test/1",
        "ratio": None,
        "nested": {"list": [1.5, None, None], "pair": [2, None]},
        "text": "NaN",
        "flag": True,
    }


def test_a_pipe_is_as_wide_as_columns_says_and_gets_no_padding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.table import Table

    for columns, width in (("", 200), ("wide", 200), ("60", 60)):
        monkeypatch.setenv("COLUMNS", columns)
        table = Table(expand=True, box=None)
        table.add_row("a", "word " * 90)
        console().print(table)
        lines = capsys.readouterr().out.splitlines()
        assert width - 12 < max(map(len, lines)) <= width
        assert all(line == line.rstrip() for line in lines)


def test_an_error_breaks_between_words_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = UsageError("model 'x'", found="word " * 30 + "a" * 60, remedy="pass a folder")
    print_core_error(error, as_json=False, debug=False)
    assert str(error) in capsys.readouterr().err
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_core_error(error, as_json=False, debug=False)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(" ".join(lines).split()) == " ".join(f"error: {error}".split())
    assert "a" * 60 in lines[-2] and max(map(len, (*lines[:-2], lines[-1]))) <= 50
    assert [len(line) - len(line.lstrip()) for line in lines] == [0, 2, *[4] * (len(lines) - 3), 2]
    assert main(["run", "--no-such"]) == 2
    assert all(len(line) <= 50 for line in capsys.readouterr().err.splitlines())


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"core {__version__}, Python 3.")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("core de", [name for name in COMMANDS if name.startswith("de")]),
        ("core run --de", ["--device", "--deterministic"]),
        ("core conformance --device c", ["cpu", "cuda"]),
        ("core passes --device n", ["npu"]),
        ("core explain --dtype b", ["bfloat16"]),
    ],
)
def test_a_shell_can_complete_commands_options_and_values(line: str, completed: list[str]) -> None:
    shell = {"_CORE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    code = "import sys; from core.cli import main; code = main(); sys.exit('torch' if 'torch' in sys.modules else code)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | shell, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == completed, done.stderr
    assert done.returncode == 0, done.stderr


def test_what_takes_long_is_a_line_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_LONG_S", 0.05)
    with status("short", quiet=False) as say:
        say("long")
        deadline = time.monotonic() + 30
        shown = ""
        while "long" not in shown and time.monotonic() < deadline:
            time.sleep(0.01)
            shown += capsys.readouterr().err
        say("short again")
    with status("quiet", quiet=True) as say:
        say("quiet too")
        time.sleep(0.1)
    assert shown == "core: long\n" and capsys.readouterr().err == ""


def test_loading_tells_a_line_of_what_takes_long_counted_or_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_LONG_S", 0.0)

    def told(after: int) -> list[str]:
        deadline, shown = time.monotonic() + 30, ""
        while shown.count("\n") < after and time.monotonic() < deadline:
            time.sleep(0.01)
            shown += capsys.readouterr().err
        return shown.splitlines()

    with loading("importing torch", quiet=False) as progress:
        assert told(1) == ["core: importing torch"]
        progress("loading the model", 0, 0)
        assert told(1) == ["core: loading the model"]
        progress("capture decode[8]", 1, 2)
        assert told(1) == ["core: capture decode[8] (1 of 2 done)"]
        progress("capture", 2, 2)
    with loading("quiet", quiet=True) as progress:
        progress("capture", 0, 2)
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_slow_start_is_told_until_something_else_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_LONG_S", 0.1)
    for other in (lambda: status("next", quiet=False), lambda: loading("next", quiet=False)):
        output.start(quiet=False)
        with other():
            pass
    output.start(quiet=False)
    output.end_start()
    output.start(quiet=True)
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
    output.start(quiet=False)
    time.sleep(0.3)
    output.end_start()
    assert capsys.readouterr().err == "core: importing torch\n"


@pytest.mark.slow
def test_no_package_is_asked_for_whose_layers_become_ops() -> None:
    arguments = ("run", "mamba2", "--device", "cpu", "--mode", "off", "--no-check", "--max-new-tokens", "2")
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    command = [sys.executable, "-P", "-m", "core", *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=240, text=True)
    assert done.returncode == 0 and "install" not in done.stderr, done.stderr
