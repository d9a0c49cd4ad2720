"""The Makefile: which tests its targets run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = "plugins/npu/tests/simulated/simulator/test_build.py"


@pytest.mark.parametrize(
    ("arguments", "ends"),
    [
        ("", "plugins/npu/tests"),
        ("-k word -x", "plugins/npu/tests -k word -x"),
        ("-k plugins --ignore=plugins/npu/tests/data", "plugins/npu/tests -k plugins --ignore=plugins/npu/tests/data"),
        (FILE, FILE),
        (f"-x ./{FILE}::test_a", f"-x ./{FILE}::test_a"),
        (str(ROOT / FILE), str(ROOT / FILE)),
    ],
)
def test_a_path_narrows_the_tests_of_the_simulated_npu(arguments: str, ends: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "--no-print-directory", "-n", "test-npu-sim", f"ARGS={arguments}"]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert " ".join(shown.split()).endswith(f"--dist loadfile {ends}")
