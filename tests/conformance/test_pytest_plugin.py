"""The suite as pytest items: pytest runs of small suites, in this process where nothing asks for one of its own."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.conformance.suites import write_suite

InstallVendor = Callable[..., Any]

ROOT = Path(__file__).resolve().parents[2]

EVERYTHING = """
def fails(trial):
    raise ValueError("no such luck")

def skips(trial):
    raise Skip("no compiler here")

def crashes(trial):
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def collect(device, profile):
    yield case("torch/crashes", crashes)
    yield case("torch/after")
    yield case("ops/hangs", lambda trial: time.sleep(60), timeout_s=1.0)
    yield case("ops/rms_norm/a-b/float32", fails)
    yield case("ops/declared", fails, not_supported="dtype int1 is not declared")
    yield case("fakes/skips", skips)
    yield case("graphs/known", fails)
    yield case("graphs/mended")
    yield case("models/late")
    yield case("fuzz/a", lambda trial: trial.note(f"fuzz {trial.fuzz}"))
"""
XFAIL = """
schema = "core.xfail/1"
[[expected]]
case = "graphs/known"
reason = "a known bug"
until = "99"
[[expected]]
case = "graphs/mended"
reason = "another one"
until = "99"
"""
PASSING = """
def alone(trial):
    open(FILE, "a").write(f"{trial.seed} begins\\n")
    time.sleep(0.3)
    open(FILE, "a").write(f"{trial.seed} ends\\n")

def beside(trial):
    open(FILE, "a").write("beside\\n")
    time.sleep(0.05)

def collect(device, profile):
    for number in range(6):
        yield case(f"torch/alone-{number}", alone, exclusive=True)
        yield case(f"torch/beside-{number}", beside)
    for area in ("ops", "fakes", "graphs", "passes", "models"):
        yield case(f"{area}/a")
"""


@dataclass
class Ran:
    """One run of pytest. outcomes: by case."""

    code: int
    text: str
    outcomes: dict[str, str]

    @property
    def summary(self) -> list[str]:
        """The lines of the suite's own section."""
        lines = re.split(r"=+ core conformance =+\n", self.text)[-1].splitlines()
        return [line for line in lines[: next((n for n, line in enumerate(lines) if line[:1] == "="), None)] if line]


PLUGIN = ("--pyargs", "core_conformance", "-p", "core_conformance.pytest_plugin", "-W", "error")


def run_pytest(folder: Path, *arguments: str, device: str = "cpu", path: Path | None = None) -> Ran:
    """Run the suite with pytest in a folder, here. path: searched for modules first, by the workers of the run too."""
    junit, printed = folder / "junit.xml", io.StringIO()
    chosen = ("--device", device) if device else ()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        if path is not None:
            patch.syspath_prepend(str(path))
        for name in ("core_conformance.pytest_plugin", "core_conformance.test_conformance"):
            patch.delitem(sys.modules, name, raising=False)  # pytest is to import them, as in a process of its own
        code = pytest.main([*PLUGIN, f"--junitxml={junit}", *chosen, *arguments])
    return Ran(int(code), printed.getvalue(), dict(_outcomes(junit)) if junit.exists() else {})


def run_pytest_alone(folder: Path, *arguments: str, junit: Path, path: Path) -> Ran:
    """Do the same in a process of its own."""
    command = [sys.executable, "-m", "pytest", *PLUGIN, f"--junitxml={junit}", "--device", "cpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path[1:]]), "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300, check=False
    )
    return Ran(done.returncode, done.stdout + done.stderr, dict(_outcomes(junit)) if junit.exists() else {})


def _outcomes(junit: Path) -> Iterator[tuple[str, str]]:
    for case in ElementTree.parse(junit).iter("testcase"):
        kinds = {child.tag: child for child in case if child.tag != "properties"}
        name = (case.get("name") or "").partition("[")[2].rstrip("]")
        kind, node = next(iter(kinds.items()), ("passed", None))
        yield name, kind if node is None else f"{kind}: {node.get('type')}: {node.get('message')}\n{node.text}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("everything")
    (folder / "xfail.toml").write_text(XFAIL)
    return folder


@pytest.fixture(scope="module")
def everything(folder: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_suite(folder, monkeypatch, EVERYTHING).host


@pytest.fixture(scope="module")
def ran(folder: Path, everything: str) -> Ran:
    arguments = ("--core-suite", everything, "--core-xfail", "xfail.toml", "--core-fuzz", "3", "-rA")
    return run_pytest(folder, *arguments, path=folder)


@pytest.mark.slow
def test_each_status_has_an_outcome_of_pytest(ran: Ran) -> None:
    passed = {"host/one", "torch/after", "models/late", "fuzz/a"}
    assert {id for id, outcome in ran.outcomes.items() if outcome == "passed"} == passed, ran.text
    failed = ran.outcomes["ops/rms_norm/a-b/float32"]
    assert failed.startswith("failure") and "fail: ValueError: no such luck" in failed and "in fails" in failed
    assert "pytest_plugin.py" not in failed, "the traceback is the case's own"
    crashed = ran.outcomes["torch/crashes"]
    assert "crash: its process crashed with SIGSEGV" in crashed and "last words" in crashed
    assert "timeout: its process gave no answer within 1 s" in ran.outcomes["ops/hangs"]
    assert "xpass: passes, and xfail.toml expects it to fail" in ran.outcomes["graphs/mended"]
    assert ran.outcomes["graphs/known"].startswith("skipped: pytest.xfail: ")
    assert "ValueError" in ran.outcomes["graphs/known"] and "a known bug" in ran.outcomes["graphs/known"]
    assert "not-supported: dtype int1 is not declared" in ran.outcomes["ops/declared"]
    assert "skip: no compiler here" in ran.outcomes["fakes/skips"]
    assert ran.code == 1


@pytest.mark.slow
def test_the_summary_says_what_is_in_the_way(ran: Ran) -> None:
    assert ran.summary[0] == "device cpu: level 0 of 3"
    assert ran.summary[1] == "  torch/crashes: crash: its process crashed with SIGSEGV"
    assert any(line.startswith("  ops/rms_norm/a-b/float32: fail: ValueError") for line in ran.summary)


@pytest.mark.slow
def test_failures_run_again_and_grant_no_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xfail.toml").write_text(XFAIL)
    unhurt = re.sub(r"    yield .*(crashes|hangs).*\n", "", EVERYTHING)
    suite = write_suite(tmp_path, monkeypatch, unhurt).host
    arguments = ("--core-suite", suite, "--core-xfail", "xfail.toml", "--core-fuzz", "3")
    assert len(run_pytest(tmp_path, *arguments).outcomes) == 9
    again = run_pytest(tmp_path, *arguments, "--lf")
    assert set(again.outcomes) == {"ops/rms_norm/a-b/float32", "graphs/mended"}
    assert again.summary[0] == "device cpu: level none"
    assert "only some cases were chosen" in again.summary[1]


@pytest.mark.slow
def test_cases_are_chosen_by_their_ids_in_this_checkout_too(folder: Path, everything: str, tmp_path: Path) -> None:
    arguments = ("--core-suite", everything, "-p", "no:cacheprovider", "-k", "after or (ops/ and not hangs)")
    chosen = run_pytest_alone(ROOT, *arguments, junit=tmp_path / "junit.xml", path=folder)
    assert set(chosen.outcomes) == {"torch/after", "ops/rms_norm/a-b/float32", "ops/declared"}, chosen.text
    assert chosen.summary[0] == "device cpu: level none"


@pytest.mark.slow
def test_processes_of_xdist_share_the_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    log = tmp_path / "log"
    suite = write_suite(tmp_path, monkeypatch, f"FILE = {str(log)!r}\n{PASSING}").host
    arguments = ("--core-suite", suite, "-n", "2")
    ran = run_pytest_alone(tmp_path, *arguments, junit=tmp_path / "junit.xml", path=tmp_path)
    assert ran.code == 0 and len(ran.outcomes) == 18, ran.text
    assert ran.summary[0] == "device cpu: level 3 of 3"
    lines = log.read_text().splitlines()
    begun = [n for n, line in enumerate(lines) if line.endswith("begins")]
    assert len(begun) == 6 and all(lines[n + 1].endswith("ends") for n in begun), lines


@pytest.mark.slow
def test_a_device_that_does_not_open_leaves_level_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_vendor: InstallVendor
) -> None:
    plugin = """
    @hookimpl
    def core_open_device(context):
        raise DeviceUnavailableError("device 'acme'", found="no driver", remedy="install one")
    """
    install_vendor(plugin=plugin)
    suite = write_suite(tmp_path, monkeypatch, EVERYTHING).host
    ran = run_pytest(tmp_path, "--core-suite", suite, device="acme", path=tmp_path)
    assert ran.outcomes == {"host/one": "passed"}, ran.text
    assert ran.summary[:2] == [
        "device acme: level 0 of 3",
        "  the cases above level 0 could not be collected: no driver",
    ]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("device", "arguments", "said"),
    [
        ("", (), "give --device NAME"),
        ("nonsense", (), "'nonsense'"),
        ("cpu", ("--core-xfail", "/nowhere/x.toml"), "/nowhere/x.toml"),
        ("cpu", ("--core-level", "7"), "--core-level"),
        ("", ("-p", "no:core_conformance.pytest_plugin"), "add -p core_conformance.pytest_plugin"),
    ],
)
def test_errors_say_what_to_do(
    device: str, arguments: tuple[str, ...], said: str, tmp_path: Path, folder: Path, everything: str
) -> None:
    suite = () if "-p" in arguments else ("--core-suite", everything)
    ran = run_pytest(tmp_path, *suite, *arguments, device=device, path=folder)
    assert ran.code in (2, 4) and said in ran.text, ran.text
    assert "Traceback" not in ran.text and "pytest_plugin.py:" not in ran.text
