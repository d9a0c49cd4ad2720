"""`core conformance`: exit codes, errors, what goes to which stream, and what it needs installed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.cli import main
from core_conformance.runner.protocol import SuiteModules
from core_conformance.runner.session import Options
from tests.conformance.suites import write_suite

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
def fails(trial):
    number = 41
    raise ValueError(f"no {number}")

def prints(trial):
    print("from Python")
    os.write(1, b"from a C library\\n")

def skips(trial):
    raise Skip("no compiler here")

def interrupted(trial):
    raise KeyboardInterrupt

def terminated(trial):
    os.kill(os.getpid(), 15)

def collect(device, profile):
    for area in ("torch", "ops", "fakes", "graphs", "passes"):
        yield case(f"{area}/a", prints)
    yield case("ops/declared", fails, not_supported="dtype int1 is not declared")
    yield case("models/a")
    yield case("models/fails", fails)
    yield case("models/skips", skips)
    yield case("fuzz/a")
    yield case("fuzz/interrupted", interrupted)
    yield case("fuzz/terminated", terminated)
"""

COMMAND = "import sys; from core.cli import main; sys.exit(main(sys.argv[1:]))"
# The same on the suite that the first argument names.
OTHER_SUITE = """
import sys
from functools import partial
import core_conformance.runner.session as running
from core.cli import main
from core_conformance.runner.protocol import SuiteModules
name = sys.argv[1]
running.Options = partial(running.Options, suite=SuiteModules(host=name, collectors=(name,)))
sys.exit(main(sys.argv[2:]))
"""

RUN = ("conformance", "--device", "cpu", "--in-process")
LEVEL_2 = (*RUN, "--level", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suite")


@pytest.fixture(scope="module")
def suite(folder: Path) -> Iterator[SuiteModules]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_suite(folder, monkeypatch, SOURCE)


@pytest.fixture(autouse=True)
def _suite_of_the_command(suite: SuiteModules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core_conformance.runner.session.Options", partial(Options, suite=suite))


def chosen(*ids: str) -> list[str]:
    return [*RUN, *(part for id in ids for part in ("--case", id))]


def expecting(folder: Path, *ids: str) -> list[str]:
    entries = "".join(f'[[expected]]\ncase = "{id}"\nreason = "known"\nuntil = "9"\n' for id in ids)
    (folder / "xfail.toml").write_text(f'schema = "core.xfail/1"\n{entries}')
    return ["--xfail", str(folder / "xfail.toml")]


def run_alone(program: str, *arguments: str, path: Path, **options: Any) -> Any:
    """Run a program in a process of its own. path: a folder that is searched for modules first."""
    folders = os.pathsep.join(map(str, (path, ROOT, ROOT / "conformance")))
    environment = {**os.environ, "PYTHONPATH": folders}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, text=True, timeout=120, check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (LEVEL_2, 0, "LEVEL 2 OF 3"),
        ((*chosen("fuzz/a"), "--fuzz", "1"), 0, "1 pass"),
        (RUN, 1, "models/fails"),
        (chosen("models/a"), 0, "1 pass"),
        (chosen("models/a", "models/skips"), 0, "1 skip"),
        (chosen("models/skips"), 1, "1 skip"),
        (chosen("ops/declared"), 1, "int1"),
        (chosen("models/fails"), 1, "no 41"),
        ((*LEVEL_2, "--device", "nonsense"), 2, "nonsense"),
        (chosen("op/a"), 2, "did you mean 'ops/a'"),
        (chosen("fuzz/a"), 2, "--fuzz"),
        ((*LEVEL_2, "--case", "models/a"), 2, "--level"),
        ((*LEVEL_2, "--xfail", "/nowhere/x.toml"), 2, "/nowhere/x.toml"),
        ((*LEVEL_2, "--html", "/nowhere/r.html"), 2, "there is no folder '/nowhere'"),
        ((*LEVEL_2, "--html", "-"), 2, "only --json goes to standard output"),
        (("conformance", "--from", "/nowhere/r.json"), 2, "/nowhere/r.json"),
        ((*RUN, "--level", "4"), 2, "--level"),
        ((*chosen("fuzz/interrupted"), "--fuzz", "1"), 130, ""),
    ],
)
def test_exit_codes(
    arguments: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # A skip and a failure stand in the way of level 3, and of no level below.
    assert main(arguments) == code
    streams = capsys.readouterr()
    assert said in (streams.err if code == 2 else streams.out)
    assert "Traceback" not in streams.err and (code != 2 or streams.out == "")


@pytest.mark.slow
def test_expected_failures_excuse_a_level_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = expecting(tmp_path, "models/fails")
    assert main([*RUN, *known]) == 1, "a skip is in the way of the level as well"
    assert "1 xfail" in capsys.readouterr().out
    other = write_suite(tmp_path, monkeypatch, SOURCE.replace('yield case("models/skips", skips)', "pass"))
    monkeypatch.setattr("core_conformance.runner.session.Options", partial(Options, suite=other))
    assert main([*RUN, *known]) == 0
    assert "LEVEL 2 OF 3" in capsys.readouterr().out
    assert main([*chosen("models/fails", "models/a"), *known]) == 0
    assert main([*chosen("models/a"), *expecting(tmp_path, "models/a")]) == 1


def test_a_provider_is_its_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--list", "--provider", "Own kernel"]) == 2  # the planted suite has no such case
    assert "ops/*/own-kernel/*" in capsys.readouterr().err
    monkeypatch.setattr("core_conformance.runner.session.Options", Options)
    command = ["conformance", "--device", "cpu", "--in-process", "--list", "--provider", "eager"]
    assert main(command) == 0
    listed = [line.split()[0].split("/") for line in capsys.readouterr().out.splitlines()]
    assert listed and all((area, name) == ("ops", "eager") for area, _, name, *_ in listed)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--from", "r.json", "--level", "1"), "--from with --level"),
        (("--from", "r.json", "--case", "ops/*", "--seed", "0"), "--from with --case, --seed"),
        (("--list", "--from", "r.json"), "--list"),
        (("--list", "--json", "-"), "--list with --json"),
        (("--pdb", "--workers", "2"), "--pdb with --workers"),
        (("--in-process", "--timeout-factor", "2"), "--in-process with --timeout-factor"),
    ],
)
def test_an_option_without_effect_is_refused(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments]) == 2
    streams = capsys.readouterr()
    assert named in streams.out + streams.err and "leave out" in streams.out + streams.err


@pytest.mark.parametrize(
    ("arguments", "as_json"),
    [
        (("--json", "FILE"), False),
        (("--json=FILE",), False),
        (("--json", "-", "--json", "FILE"), False),
        (("--json", "-"), True),
        (("--json=-",), True),
        (("--json=FILE", "--json", "-"), True),
        (("--json",), True),
        ((), False),
    ],
)
def test_errors_are_json_only_where_standard_output_is(
    arguments: tuple[str, ...], as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    arguments = tuple(part.replace("FILE", str(file)) for part in arguments)
    assert main([*RUN, "--device", "nonsense", *arguments]) == 2
    streams = capsys.readouterr()
    assert not file.exists()
    if as_json:
        assert json.loads(streams.out)["schema"] == "core.error/1" and streams.err == ""
    else:
        assert streams.out == "" and "nonsense" in streams.err


def test_the_option_stays_a_flag_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json", "--no-such-option"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UsageError"


def test_a_report_is_written_in_every_form_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = ("json", "html", "junit", "badge", "badge-json")
    files = {form: tmp_path / f"report.{form}" for form in forms}
    targets = [part for form, file in files.items() for part in (f"--{form}", str(file))]
    assert main([*RUN, "--level", "0", *targets]) == 0
    first = capsys.readouterr().out
    assert all(f"written: {file}" in first for file in files.values())
    before = {form: file.read_text() for form, file in files.items()}
    assert json.loads(before["json"])["schema"] == "core.conformance/1"
    other = tmp_path / "again.html"
    assert main(["conformance", "--from", str(files["json"]), "--html", str(other)]) == 0
    second = capsys.readouterr().out
    assert other.read_text() == before["html"]
    assert first.partition("written:")[0] == second.partition("written:")[0]
    assert main(["conformance", "--from", str(files["html"])]) == 2


@pytest.mark.slow
def test_a_run_over_a_failure_fails_when_it_is_read_again(tmp_path: Path) -> None:
    assert main([*chosen("models/fails"), "--json", str(tmp_path / "r.json")]) == 1
    assert main(["conformance", "--from", str(tmp_path / "r.json")]) == 1


@pytest.mark.slow
def test_standard_output_holds_the_document_alone(suite: SuiteModules, folder: Path) -> None:
    arguments = (*chosen("ops/a"), "--json", "-")
    done = run_alone(OTHER_SUITE, suite.host, *arguments, path=folder, capture_output=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [case["id"] for case in document["cases"]] == ["ops/a"] and document["passed"]
    assert "1 pass" in done.stderr and "written" not in done.stderr
    assert "from Python" in done.stderr and "from a C library" in done.stderr


@pytest.mark.slow
def test_cases_run_in_worker_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "cpu", "--case", "ops/a", "--workers", "1", "--json", "-"]) == 0
    streams = capfd.readouterr()
    assert json.loads(streams.out)["environment"]["workers"] == 1
    assert "from Python" not in streams.err and "ops: 1 pass" in streams.err


def test_the_list_is_a_line_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--list", "--level", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["host/one", "torch/a", "ops/a", "fakes/a", "ops/declared"]
    assert lines[1].endswith("shows torch/a")
    assert lines[-1].endswith("shows ops/declared [not supported: dtype int1 is not declared]")
    assert main([*chosen("models/*"), "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_list_ends_where_its_reader_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([*RUN, "--list"]) == 0


def test_the_first_failure_ends_the_run_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--fail-fast", "--json", str(tmp_path / "r.json")]) == 1
    cases = {case["id"]: case for case in json.loads((tmp_path / "r.json").read_text())["cases"]}
    assert cases["models/fails"]["status"] == "fail"
    assert cases["models/skips"]["reason"] == "not run: the run stopped at the first failure, models/fails"
    assert "models/fails" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("interrupted", 130), ("terminated", 143)])
def test_an_interrupt_leaves_the_report_on_what_was_done(
    name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = chosen("models/a", f"fuzz/{name}", "host/one")
    assert main([*cases, "--fuzz", "1", "--json", str(tmp_path / "r.json")]) == code
    report = json.loads((tmp_path / "r.json").read_text())
    done = {case["id"]: (case["status"], case["reason"]) for case in report["cases"]}
    assert done[f"fuzz/{name}"] == ("skip", "not run: the run was interrupted") and done["host/one"][0] == "pass"
    assert report["reached"] is None and report["obstacles"][0] == "the run was interrupted"
    assert "the run was interrupted" in capsys.readouterr().out


def test_an_unknown_device_is_refused_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("core_conformance.runner.session._lane", lambda *arguments: pytest.fail("a lane was made"))
    assert main(["conformance", "--device", "nonsense"]) == main([*RUN, "--device", "nonsense", "--list"]) == 2
    assert capsys.readouterr().err.count("no installed plugin has that name") == 2


@pytest.mark.slow
def test_the_debugger_stops_where_a_case_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("p number + 1\nq\n"))
    assert main(["conformance", "--device", "cpu", "--pdb", "--case", "models/fails", "--case", "models/a"]) == 1
    out = capsys.readouterr().out
    assert "(Pdb) 42\n" in out and "1 pass" in out and "1 fail" in out


@pytest.mark.slow
def test_it_runs_without_what_the_extra_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pytest", "hypothesis", "jsonschema"):
        (tmp_path / f"{name}.py").write_text(f'raise ModuleNotFoundError("No module named {name}", name="{name}")\n')
    cases = ("--fuzz", "1", "--case", "fuzz/rms_norm/reference/float32", "--case", "host/metadata")
    written = tmp_path / "r.json"
    done = run_alone(COMMAND, *RUN, *cases, "--json", str(written), path=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {case["id"]: case for case in json.loads(written.read_text())["cases"]}
    assert found["host/metadata"]["status"] == "pass"
    # The suite's own cases are collected; those of fuzzing say what they lack.
    lacking = found["fuzz/rms_norm/reference/float32"]
    assert lacking["status"] == "skip" and "[conformance]'" in lacking["reason"]
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert main(["conformance", "--from", str(written)]) == 2
    assert "jsonschema is not installed" in capsys.readouterr().err
