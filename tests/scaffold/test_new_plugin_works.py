"""What `core new-plugin` writes, from the wheel of `core`: clean, tested, installed, run, and proven to level 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scaffold.vendor import ROOT, Vendor

DEVICE = "Wave-2"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    base = tmp_path_factory.mktemp("new_plugin")
    made = Vendor(project=base / "wave", site=base / "site")
    made.install(ROOT)
    made.check("core", "new-plugin", DEVICE, "--vendor", "Wave Computing", "--into", str(made.project))
    made.install(made.project)
    return made


def test_the_wheels_are_used_not_the_checkout(vendor: Vendor) -> None:
    code = "import core, core_wave_2, sys; sys.exit(f'{core.__file__} {core_wave_2.__file__}')"
    env = {**os.environ, "PYTHONPATH": str(vendor.site)}
    found = subprocess.run([sys.executable, "-c", code], cwd=vendor.site, env=env, capture_output=True, text=True)
    assert all(Path(path).is_relative_to(vendor.site) for path in found.stderr.split()), found.stderr


def test_the_new_package_is_clean_and_typed(vendor: Vendor) -> None:
    vendor.check("ruff", "check", "--no-cache")
    vendor.check("ruff", "format", "--check", "--no-cache")
    assert "Success: no issues found" in vendor.check("mypy", "--cache-dir", os.devnull)


def test_the_tests_of_the_new_package_pass(vendor: Vendor) -> None:
    # Its test of conformance is what the test below runs, to a higher level.
    out = vendor.check("pytest", "-q", "-p", "no:cacheprovider", "--deselect", "tests/test_conformance.py")
    assert " passed" in out and "skipped" not in out


def test_the_new_device_is_listed_and_runs_a_model(vendor: Vendor) -> None:
    listed = json.loads(vendor.check("core", "devices", "--json"))["devices"]
    (row,) = [row for row in listed if row["device"] == DEVICE]
    assert (row["state"], row["plugin"]["distribution"]) == ("available", "wave-2-device")
    report = json.loads(vendor.check("core", "run", "--device", DEVICE, "--max-new-tokens", "4", "--json"))
    assert report["check"]["passed"] and report["check"]["tokens_equal"]
    assert report["program"]["modes"] == {"decode": "full", "prefill": "full"}


@pytest.mark.exhaustive  # minutes: the whole suite
def test_the_new_device_reaches_level_2(vendor: Vendor, tmp_path: Path) -> None:
    arguments = ["core", "conformance", "--device", DEVICE, "--level", "2", "--xfail", "xfail.toml"]
    vendor.check(*arguments, "--json", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["reached"] == 2
    passed = [case["id"] for case in report["cases"] if case["status"] == "pass"]
    for name in ("softcap", "squared_relu", "quick_gelu"):
        assert f"passes/wave_2_{name}/fires" in passed
