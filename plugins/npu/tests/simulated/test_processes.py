"""The conformance suite's cases of several processes, on two simulated NPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AREAS = {"ops": 30, "graphs": 9, "passes": 6, "models": 4}
"""At least so many cases of each area pass; the others are of mode `compile`, or of kernels that take no fp32."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    result: Path = tmp_path_factory.mktemp("conformance") / "result.json"
    command = [sys.executable, "-m", "core", "conformance", "--device", "npu", "--case", "*/processes/*"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_SIM_DEVICES", "2")
        patch.setenv("PYTHONPATH", ":".join(sys.path))
        done = subprocess.run(
            [*command, "--workers", "1", "--json", str(result)],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert result.exists(), done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(result.read_text())["cases"]
    return found


@pytest.mark.parametrize("area", AREAS)
def test_two_npus_compute_what_one_does(cases: list[dict[str, Any]], area: str) -> None:
    own = {case["id"]: case for case in cases if case["area"] == area}
    wrong = {name: case["reason"] for name, case in own.items() if case["status"] not in ("pass", "not-supported")}
    assert not wrong
    assert sum(case["status"] == "pass" for case in own.values()) >= AREAS[area]


def test_every_mode_of_the_device_takes_part(cases: list[dict[str, Any]]) -> None:
    passed = {case["id"] for case in cases if case["status"] == "pass"}
    assert {f"models/processes/llama/{mode}" for mode in ("off", "full", "piecewise", "segmented")} <= passed
