"""docs/conformance-faults.md tells the truth: the case it names rejects the fault, and the honest device passes it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from core_acme.faults import FAULTS, VARIABLE

from core.host.selection import conformance_profile, select_device
from core_conformance.runner.suite import collect
from tests.conformance.support import run_case

ROOT = Path(__file__).resolve().parents[2]
ACME = ROOT / "examples/acme_device"
PAGE = (ROOT / "docs/conformance-faults.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<fault>[a-z-]+)` \| (?P<what>.*?) \| `(?P<case>[^`]+)` \| (?P<count>\d+) \|", re.MULTILINE)
ROWS = {row["fault"]: row for row in ROW.finditer(PAGE)}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the example device the metadata that an installation would give it."""
    project = tomllib.loads((ACME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path / f"acme_device-{project['version']}.dist-info"
    info.mkdir()
    requires = "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"])
    version = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{requires}"
    (info / "METADATA").write_text(version)
    groups = project["entry-points"].items()
    lines = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups)
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


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


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted({row["case"] for row in ROWS.values()}))
def test_the_honest_device_passes_the_cases_that_reject(case: str) -> None:
    assert failures(case) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.process_wide])
def test_a_fault_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    assert failures(ROWS[name]["case"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.process_wide])
def test_a_fault_of_the_process_is_rejected(name: str, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    monkeypatch.setenv("PYTHONPATH", f"{installed}:{ACME}")
    command = [sys.executable, "-m", "core", "conformance", "--device", "acme", "--case", ROWS[name]["case"]]
    ended = subprocess.run([*command, "--in-process"], capture_output=True, text=True, cwd=installed)
    assert ended.returncode == 1, ended.stderr
    assert "FAIL" in ended.stdout
