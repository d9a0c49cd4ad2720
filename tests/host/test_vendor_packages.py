"""Packages as vendors ship them: built as wheels, installed beside `core`'s own wheel, used from outside the checkout.

The example device must work, and each broken package must be refused with the exact cause while all others go on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENDORS = ROOT / "tests" / "vendors"
GUIDE = ROOT / "docs" / "writing-a-plugin.md"
DEFAULT_PROMPT = "If the argument is"  # of `core run`
PROBE_TIMEOUT_S = 20  # of a working probe on a busy machine; the hanging one gets HANGING_TIMEOUT_S
HANGING_TIMEOUT_S = 2
SELECTED = "-- asked --\n"
SELECT = f"""
import sys, traceback
import core
for name in sys.argv[1:]:
    try:
        print(core.select_device(name), flush=True)
    except core.CoreError:
        print("refused", flush=True)
        traceback.print_exc()
    print({SELECTED!r}, end="", file=sys.stderr, flush=True)
"""

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Selected:
    """What came of devices, by the names that were asked for. printed: the device, or "refused". told: on stderr."""

    printed: dict[str, str]
    told: dict[str, str]


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheels of `core` and of the example device, and a folder to stand in."""

    folder: Path
    outside: Path
    wheels: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command outside the checkout, with nothing of this process's Python or plugin settings."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CORE_", "ACME_", "VIRTUAL_ENV"))}
        env |= {"CORE_PROBE_TIMEOUT_S": str(PROBE_TIMEOUT_S), **variables}
        return subprocess.run(command, cwd=self.outside, env=env, capture_output=True, text=True, timeout=240)

    def core(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.folder / "bin" / "core", *arguments, **variables)

    def devices(self, **variables: str) -> list[dict[str, Any]]:
        """Return what `core devices --json` lists."""
        listed = self.core("devices", "--json", **variables)
        assert listed.returncode == 0, listed.stderr
        return list(json.loads(listed.stdout)["devices"])

    def select(self, *devices: str, **variables: str) -> Selected:
        """Select devices in a fresh interpreter, each whatever became of those before.

        One interpreter for several, because nearly all of its time is the import of torch.
        """
        ran = self.run(self.python, "-c", SELECT, *devices, **variables)
        assert ran.returncode == 0, ran.stderr
        told = dict(zip(devices, ran.stderr.split(SELECTED), strict=False))
        return Selected(printed=dict(zip(devices, ran.stdout.splitlines(), strict=True)), told=told)

    @contextmanager
    def installed(self, *vendors: str) -> Iterator[None]:
        """Have packages in tests/vendors installed for a while."""
        wheels = [str(_build(VENDORS / vendor, self.wheels)) for vendor in vendors]
        self.pip("install", "--no-index", "--no-deps", *wheels)
        try:
            yield
        finally:
            self.pip("uninstall", "--yes", *(f"vendor-{vendor.replace('_', '-')}" for vendor in vendors))

    def pip(self, *arguments: str) -> None:
        _call([sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python), *arguments])


def _call(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def _build(project: Path, wheels: Path) -> Path:
    """Build the wheel of a project as its author would, short of fetching hatchling anew."""
    target = wheels / project.name
    if not target.exists():
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(project)]
        _call(command)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    base = tmp_path_factory.mktemp("vendors")
    made = Environment(folder=base / "env", outside=base / "outside", wheels=base / "wheels")
    made.outside.mkdir()
    _call([sys.executable, "-m", "venv", "--without-pip", str(made.folder)])
    for project in (ROOT, ROOT / "examples" / "acme_device"):
        made.pip("install", "--no-index", "--no-deps", str(_build(project, made.wheels)))
    # torch and transformers come from the environment that runs this test: installing them again would take minutes.
    # A path in a .pth file stands on sys.path behind the folder that holds the file, so the wheel of `core` wins over
    # any `core` installed there; and .pth files that lie there (an editable install is one) are not read at all.
    (site_packages,) = (made.folder / "lib").glob("python*/site-packages")
    borrowed = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return made


def _row(devices: list[dict[str, Any]], distribution: str) -> dict[str, Any]:
    (row,) = [row for row in devices if row["plugin"]["distribution"] == distribution]
    return row


def _assert_told(text: str, *phrases: str) -> None:
    """Assert that the user is told each phrase, and that the guide for vendors quotes it as it is."""
    guide = GUIDE.read_text(encoding="utf-8")
    for phrase in phrases:
        assert phrase in text
        assert phrase in guide, f"docs/writing-a-plugin.md does not quote: {phrase}"


def _assert_acme_works(devices: list[dict[str, Any]], selected: Selected) -> None:
    """Assert that the example device is listed as available, and was selected without a word."""
    assert _row(devices, "acme-device")["state"] == "available"
    assert selected.printed["acme"] == "acme (Acme A1 (simulated); plugin acme-device 0.1.0)"
    assert selected.told["acme"] == ""


def test_the_wheel_of_core_is_used_not_the_checkout(environment: Environment) -> None:
    found = environment.run(
        environment.python, "-c", "import core, core_acme; print(core.__file__, core_acme.__file__)"
    )
    assert found.returncode == 0, found.stderr
    assert all(Path(path).is_relative_to(environment.folder) for path in found.stdout.split())


def test_the_example_device_is_listed(environment: Environment) -> None:
    row = _row(environment.devices(), "acme-device")
    assert (row["device"], row["state"], row["device_count"]) == ("acme", "available", 1)
    assert row["plugin"]["version"] == "0.1.0"
    assert row["plugin"]["requires_core"] in (">=0.1,<0.3", "<0.3,>=0.1")
    assert row["plugin"]["in_tree"] is False


def test_an_unplugged_device_says_why_and_what_to_do(environment: Environment) -> None:
    row = _row(environment.devices(ACME_NUM_DEVICES="0"), "acme-device")
    assert (row["state"], row["device_count"]) == ("unavailable", 0)
    assert "unplugged" in row["reason"] and row["hint"] == "unset ACME_NUM_DEVICES"
    told = environment.select("acme", ACME_NUM_DEVICES="0").told["acme"]
    assert "DeviceUnavailableError: device 'acme', index 0" in told
    _assert_told(
        told,
        "found: 0 device(s): ACME_NUM_DEVICES is 0: the simulated device is unplugged",
        "to do: unset ACME_NUM_DEVICES",
    )


def test_the_example_device_runs_a_model(environment: Environment) -> None:
    run = environment.core("run", "--device", "acme", "--max-new-tokens", "6")
    assert run.returncode == 0, run.stderr
    text, _, table = run.stdout.partition("\n\n")
    assert len(text.split()) > len(DEFAULT_PROMPT.split()) and text.startswith(DEFAULT_PROMPT)
    # A value that is too long goes on in the next line, indented.
    lines = [line.strip() for line in table.splitlines() if line.strip() and not line.startswith(" ")]
    rows = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines)
    assert (rows["device"], rows["plugin"]) == ("acme: Acme A1 (simulated)", "acme-device 0.1.0")
    assert rows["programs"].startswith("decode full, prefill piecewise; lowering inline")
    assert rows["greedy tokens"].startswith("equal to eager")
    assert rows["max logits error"].endswith("criterion T1 holds")
    assert list(rows)[:3] == ["greedy tokens", "max logits error", "tokens/s, eager"]  # what matters comes first


def test_a_probe_that_hangs(environment: Environment) -> None:
    patience = {"CORE_PROBE_TIMEOUT_S": str(HANGING_TIMEOUT_S)}
    with environment.installed("hanging_probe"):
        devices = environment.devices(**patience)
        row = _row(devices, "vendor-hanging-probe")
        assert row["state"] == "broken"
        assert f" within {HANGING_TIMEOUT_S} s and was killed" in row["reason"]
        _assert_told(row["reason"], "its probe vendor_hanging_probe_probe:probe gave no answer within ")
        _assert_told(row["hint"], "run `core doctor`, and report it to the author of vendor-hanging-probe")
        chosen = environment.select("acme", "auto", **patience)
        assert "hanging" not in chosen.printed["auto"] != "refused"
        _assert_acme_works(devices, chosen)


@dataclass(frozen=True)
class Broken:
    """What is listed and what comes of asking while broken packages are installed."""

    devices: list[dict[str, Any]]
    asked: Selected


@pytest.fixture(scope="module")
def broken(environment: Environment) -> Iterator[Broken]:
    """Have four broken packages installed at once, and ask for each, and for the example device."""
    with environment.installed("broken_import", "wrong_range", "misspelt_hook", "claims_cpu"):
        asked = environment.select("acme", "brokenimport", "wrongrange", "misspelt", "cpu")
        yield Broken(environment.devices(), asked)


def test_broken_packages_keep_no_other_from_working(broken: Broken) -> None:
    _assert_acme_works(broken.devices, broken.asked)
    assert {name for name, printed in broken.asked.printed.items() if printed == "refused"} == {
        "brokenimport",
        "wrongrange",
        "misspelt",
        "cpu",
    }


def test_a_plugin_that_does_not_import(broken: Broken, environment: Environment) -> None:
    row = _row(broken.devices, "vendor-broken-import")
    assert row["state"] == "available", "listing imports no plugin, and this one has no probe"
    told = broken.asked.told["brokenimport"]
    assert "PluginError: device 'brokenimport'" in told
    _assert_told(
        told,
        "found: plugin vendor-broken-import 1.2.3 (vendor_broken_import) is broken: "
        "importing it raised ModuleNotFoundError: No module named 'kernels_that_nobody_installed'",
        "to do: report it to the author of vendor-broken-import; `core doctor` shows the traceback",
    )
    doctor = environment.core(
        "doctor", "--json", CORE_PLUGINS_DISABLE="core,vendor-misspelt-hook,vendor-claims-cpu,vendor-wrong-range"
    )
    assert doctor.returncode == 1, doctor.stderr
    verdicts = {row["device"]: row["verdict"] for row in json.loads(doctor.stdout)["plugins"]}
    assert (verdicts["brokenimport"], verdicts["acme"]) == ("fail", "pass")


def test_a_plugin_for_another_version_of_core(broken: Broken) -> None:
    row = _row(broken.devices, "vendor-wrong-range")
    assert row["state"] == "incompatible"
    assert row["reason"].startswith("it requires core >=9, and this is core 0.")
    assert row["hint"].startswith("install a version of vendor-wrong-range made for core 0.")
    told = broken.asked.told["wrongrange"]
    assert "PluginVersionError: device 'wrongrange'" in told
    _assert_told(
        told,
        "found: plugin vendor-wrong-range 1.2.3 is incompatible: it requires core >=9, and this is core 0.",
        "to do: install a version of vendor-wrong-range made for core 0.",
    )
    assert "AssertionError" not in told, "a plugin outside its range is not imported"


def test_a_plugin_with_a_misspelt_hook(broken: Broken) -> None:
    told = broken.asked.told["misspelt"]
    assert "PluginError: device 'misspelt'" in told
    _assert_told(
        told,
        "found: plugin vendor-misspelt-hook 1.2.3 (vendor_misspelt_hook) is broken: it implements hook "
        "'core_graph_backends', which does not exist; did you mean 'core_graph_backend'?",
        "to do: report it to the author of vendor-misspelt-hook; `core doctor` shows the traceback",
    )


def test_a_plugin_that_claims_a_taken_name(broken: Broken, environment: Environment) -> None:
    assert {row["state"] for row in broken.devices if row["device"] == "cpu"} == {"conflict"}
    told = broken.asked.told["cpu"]
    assert "PluginConflictError: device 'cpu'" in told
    # Which claimant is named first depends on the order of the metadata folders.
    _assert_told(
        told,
        "found: device name 'cpu' is claimed by ",
        "vendor-claims-cpu 1.2.3 (vendor_claims_cpu)",
        "core 0.",
        "to do: uninstall one of them, or set CORE_PLUGINS_DISABLE=",
        "CORE_PLUGINS_DISABLE=vendor-claims-cpu",
        "CORE_PLUGINS_DISABLE=core:cpu",
    )
    separated = environment.select("cpu", CORE_PLUGINS_DISABLE="vendor-claims-cpu")
    assert "plugin core 0." in separated.printed["cpu"]
