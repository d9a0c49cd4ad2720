"""Command lines drawn from the parameters that the subcommands declare: one clear error, or they are taken."""

from __future__ import annotations

import inspect
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.cli import COMMANDS, _app, main
from core.errors import UsageError

NUM_CASES, NUM_QUICK = 200, 20
SEEDS = [pytest.param(seed, marks=() if seed < NUM_QUICK else pytest.mark.exhaustive) for seed in range(NUM_CASES)]
TEXTS = (
    *("", "x", "-", "--", "a=b", "=", ",", ",,", "a,b=c=d", "*", "%s", "{}", "[bold]", "../..", "/", "/dev/null"),
    *("~", "~nosuchuser/x", "caf\udce9", "a\0b", "x" * 300, "/".join(["y" * 200] * 30), "\x1b[31m", "日本", "help"),
    *("cpu", "cpu:99", "cpu:x", "decode=full", "decode=off,decode=off", "module:attribute", ":", "int8", "w4a16-g0"),
)
NUMBERS = (
    *("0", "1", "2", "-1", "-0", "1.5", "1e400", "inf", "-inf", "nan", "0x10", "1_0", "٣", " 1", "", "x"),
    *(str(2**31), str(2**63), str(2**64), str(-(2**64)), "9" * 400, "9" * 5000, "1,2", "1,,2", "1," + "9" * 30),
)


class _Taken(UsageError):
    """Raised in place of the work that a command line asks for."""


def taken(*args: Any, **options: Any) -> None:
    raise _Taken("taken", found="the command line was accepted", remedy="nothing")


@pytest.fixture(autouse=True)
def works_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """End each command line where the work begins; nothing is written but below a folder of the test's own."""
    monkeypatch.setattr("core.engine.models.loading._check_dtype", taken)
    monkeypatch.setattr("core.bench.bench.bench", taken)
    monkeypatch.setattr("core.bench.model.random_model", taken)
    monkeypatch.setattr("core.bench.start.measure_start", taken)
    monkeypatch.setattr("core.cli.doctor.diagnose", taken)
    monkeypatch.setattr("core.verify.fakes.checks.check_library", taken)
    monkeypatch.setattr("core_conformance.runner.session.run", taken)
    monkeypatch.setattr("core_conformance.runner.session.list_chosen", taken)
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "cuda,npu")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def function_of(name: str) -> Any:
    """Return the function behind a subcommand."""
    module, _, function = COMMANDS[name].partition(":")
    return getattr(import_module(module), function)


def drawn(source: random.Random) -> list[str]:
    """Return a command line: a subcommand, some of its parameters with odd values, and sometimes one too many."""
    name = source.choice(sorted(COMMANDS))
    parsed: Any = typer.main.get_command(_app(name))
    params = [each for each in parsed.commands[name].params if each.name != "help"]
    # As written: typer has a click of its own or the installed one, whose parameters tell their types differently.
    kinds = {each: str(kind) for each, kind in inspect.get_annotations(function_of(name)).items()}
    line = [name]
    for param in source.sample(params, min(len(params), source.choice((1, 1, 2, 3)))):
        option = [] if param.param_type_name == "argument" else [source.choice([*param.opts, *param.secondary_opts])]
        if getattr(param, "is_flag", False):
            line += option
            continue
        is_number = kinds[param.name] in ("int", "float", "int | None")
        choices = [*TEXTS, *NUMBERS] if not is_number or source.random() < 0.2 else NUMBERS
        line += [*option, source.choice(choices)]
    if "--device" not in line and any("--device" in param.opts for param in params):
        line += ["--device", "cpu"]
    if source.random() < 0.1:
        line.insert(source.randrange(len(line) + 1), source.choice(("--nosuch", *TEXTS)))
    return line


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_command_line_has_one_error_or_is_taken(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    line = drawn(random.Random(seed))
    code = main(line)
    out, err = capsys.readouterr()
    assert "internal error" not in f"{out}{err}" and "Traceback" not in err, (line, err[-500:])
    assert code in (0, 2), (line, code, err)
    told = f"{out}{err}"
    assert code == 0 or ("to do: " in told) + ("Usage: " in told) + ('"remedy"' in told) == 1, (line, told)
    # An error repeats what was typed, a few times at most.
    assert err.count("error: ") <= 1 and len(err) < 4000 + 4 * len(" ".join(line)), (line, err)
