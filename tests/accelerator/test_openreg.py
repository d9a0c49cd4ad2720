"""The generic device on the example accelerator of PyTorch's sources, `torch_openreg`, where it is installed.

It is not built here: install it into the environment that runs these tests (`make test-openreg PYTHON=...`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

DEVICE = "openreg"

pytestmark = [
    pytest.mark.openreg,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch_openreg") is None, reason="torch_openreg is not installed (make test-openreg)"),
]


def run(*arguments: str, code: int = 0) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "core", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stderr if code == 2 else done.stdout


def test_it_is_listed_as_what_it_is() -> None:
    (row,) = [row for row in json.loads(run("devices", "--json"))["devices"] if row["device"] == DEVICE]
    assert (row["state"], row["plugin"]["distribution"]) == ("available", "core") and row["device_count"] >= 1
    assert row["reason"].startswith("generic: ") and "not proven on this device" in row["reason"]


def test_a_model_runs_and_the_fault_of_the_device_is_found() -> None:
    # Its attention returns memory that nobody wrote, in eager too: nothing on it can be judged, and the run fails.
    report: dict[str, Any] = json.loads(run("run", "--device", DEVICE, "--max-new-tokens", "4", "--json", code=1))
    assert report["program"]["modes"]["decode"] == "full" and not report["check"]["passed"]
    assert "generic: " in report["device"]["reason"]


@pytest.mark.parametrize("area", ["host/*", "graphs/*/full"])
def test_no_case_of_the_host_and_of_graphs_fails(area: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run("conformance", "--device", DEVICE, "--case", area, "--json", str(file))
    counts = json.loads(file.read_text(encoding="utf-8"))["counts"]
    assert counts["pass"] > 0 and not any(counts[name] for name in ("fail", "crash", "timeout", "xfail"))


def test_a_device_beyond_those_that_torch_finds_is_refused() -> None:
    assert "choose an index below" in run("run", "--device", f"{DEVICE}:99", code=2)
