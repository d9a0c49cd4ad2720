"""docs/conformance-faults.md tells the truth: the case it names rejects the fault, and the honest device passes it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from core_acme.faults import FAULTS, VARIABLE

from core.host.selection import conformance_profile, select_device
from core_conformance.runner.suite import collect
from example_vendor import environment, install
from tests.conformance.cases.passes.pass_support import keep
from tests.conformance.support import run_case

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/conformance-faults.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<fault>[a-z-]+)` \| (?P<what>.*?) \| `(?P<case>[^`]+)` \|", re.MULTILINE)
ROWS = {row["fault"]: row for row in ROW.finditer(PAGE)}
QUICK = ("norm-eps", "replay-noise", "pass-scale")
QUICK_CASES = {ROWS[name]["case"] for name in QUICK}

# Imports what a run needs once, and runs the command in a fork for each FAULT=CASE: an import takes longer than a run.
EACH_IN_A_FORK = """
import gc, os, sys
import rich.live, rich.table, torch.testing._internal.optests
import core_conformance.command
from core.cli import main
from core_conformance.runner import session, suite
for name in suite.COLLECTORS:
    __import__(name)
gc.freeze()
variable, *wanted = sys.argv[1:]
for fault, _, case in (each.partition("=") for each in wanted):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    os.environ[variable] = fault
    os.dup2(os.open(f"{fault}.out", os.O_WRONLY | os.O_CREAT), 1)
    code = main(["conformance", "--device", "acme", "--case", case, "--in-process"])
    print("exit code", code, end="", flush=True)
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    # The pass of the device is about soft caps: two models that have them, and one that has none.
    keep(monkeypatch, "soft-cap", "repeats", "wide-soft-caps")


def failures(case_id: str) -> list[str]:
    """Return what one case finds on the device as it is now."""
    device = select_device("acme")
    profile = conformance_profile(device)
    return run_case(next(case for case in collect(device, profile) if case.id == case_id), device, profile)


def test_every_fault_has_its_row() -> None:
    assert ROWS.keys() == FAULTS.keys()
    assert len(FAULTS) >= 20
    for name, fault in FAULTS.items():
        assert ROWS[name]["what"] == fault.what
        assert ROWS[name]["case"].partition("/")[0] == fault.area
    assert f"{len(FAULTS)} faults" in PAGE
    assert f"{len(FAULTS)} planted faults" in (ROOT / "README.md").read_text(encoding="utf-8")


def named(names: Iterable[str], *quick: str) -> list[Any]:
    """Return these as parameters, all slow but those in `quick`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", named(sorted({row["case"] for row in ROWS.values()}), *QUICK_CASES))
def test_the_honest_device_passes_the_cases_that_reject(case: str) -> None:
    assert failures(case) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", named((name for name, fault in FAULTS.items() if not fault.process_wide), *QUICK))
def test_a_fault_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    assert failures(ROWS[name]["case"])


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the command with each fault of the process, each in a process of its own; return where the reports lie."""
    folder = tmp_path_factory.mktemp("faults")
    wanted = [f"{name}={ROWS[name]['case']}" for name, fault in FAULTS.items() if fault.process_wide]
    ended = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_FORK, VARIABLE, *wanted],
        env=environment(folder, *sys.path, OMP_NUM_THREADS="1"),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.process_wide])
def test_a_fault_of_the_process_is_rejected(name: str, reports: Path) -> None:
    printed, _, code = (reports / f"{name}.out").read_text(encoding="utf-8").rpartition("exit code ")
    assert code == "1", printed
    assert "FAIL" in printed
