"""What `core new-plugin` writes, on a device of torch that is not the processor: one line changed, tested, proven.

The device is "shore" of PrivateUse1 (torch_shore/). It needs a C++ compiler; without one these tests are skipped.
"""

from __future__ import annotations

import difflib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scaffold import extension
from tests.scaffold.vendor import ROOT, Vendor

DEVICE = "shore"
PLUGIN = Path("core_shore") / "plugin.py"
ON_PROCESSOR, ON_DEVICE = 'torch.device("cpu")', 'torch.device("shore", context.index)'
PAGE = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "--deselect", "tests/test_conformance.py")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        bool(reason := extension.reason_not_to_build()), reason=f"torch_shore cannot be built here: {reason}"
    ),
]


def replace_once(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file.name}"
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    base = tmp_path_factory.mktemp("other_device")
    made = Vendor(project=base / "shore", site=base / "site")
    made.install(ROOT)
    extension.install(made.site)
    made.check("core", "new-plugin", DEVICE, "--into", str(made.project))
    before = (made.project / PLUGIN).read_text(encoding="utf-8").splitlines()
    replace_once(made.project / PLUGIN, ON_PROCESSOR, ON_DEVICE)
    after = (made.project / PLUGIN).read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("+ ") for line in difflib.ndiff(before, after)) == 1
    made.install(made.project)
    return made


@pytest.fixture
def changed(vendor: Vendor, tmp_path: Path) -> Vendor:
    """Return a copy of the package to change; the folder in which it runs hides the installed one."""
    shutil.copytree(vendor.project, tmp_path / "shore")
    return Vendor(project=tmp_path / "shore", site=vendor.site)


def conformance(vendor: Vendor, report: Path, *arguments: str, passes: bool = True, **settings: str) -> Any:
    command = ["core", "conformance", "--device", DEVICE, *arguments, "--json", str(report)]
    done = vendor.run(*command, timeout_s=1800, **settings)
    assert (done.returncode == 0) is passes, done.stdout[-6000:] + done.stderr[-3000:]
    return json.loads(report.read_text(encoding="utf-8"))


def statuses(report: Any) -> dict[str, str]:
    return {case["id"]: case["status"] for case in report["cases"]}


def test_its_tests_pass_on_the_device_and_show_the_warnings_of_the_extension(vendor: Vendor) -> None:
    out = vendor.check(*PYTEST)
    assert " passed" in out and "skipped" not in out
    assert "UserWarning: shore: aten::" in out


def test_a_model_runs_on_the_device(vendor: Vendor) -> None:
    (row,) = [
        row for row in json.loads(vendor.check("core", "devices", "--json"))["devices"] if row["device"] == DEVICE
    ]
    assert row["state"] == "available"
    report = json.loads(vendor.check("core", "run", "--device", DEVICE, "--max-new-tokens", "4", "--json"))
    assert report["check"]["passed"] and report["check"]["tokens_equal"]
    assert report["program"]["modes"] == {"decode": "full", "prefill": "full"}


def test_the_device_reaches_level_2(vendor: Vendor, tmp_path: Path) -> None:
    report = conformance(vendor, tmp_path / "report.json", "--level", "2", "--xfail", "xfail.toml")
    assert report["reached"] == 2
    found = statuses(report)
    assert found["host/memory"] == found["passes/shore_softcap/fires"] == "pass"
    assert not {"fail", "xfail", "error"} & set(found.values())


def doc_changes() -> Iterator[tuple[str, str]]:
    """Yield the lines that the documentation takes out, each with the one that it puts in."""
    block = PAGE.partition("#### Without memory.py")[2].partition("```diff\n")[2].partition("```")[0]
    lines = block.replace("core_wave", "core_shore").splitlines()
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        assert (old[0], new[0]) == ("-", "+")
        yield old[1:], new[1:]


def test_memory_py_goes_as_the_documentation_says(changed: Vendor, tmp_path: Path) -> None:
    (changed.project / "core_shore" / "memory.py").unlink()
    for old, new in doc_changes():
        replace_once(changed.project / PLUGIN, f"{old}\n", f"{new}\n")
    changed.check("ruff", "check", "--no-cache")
    changed.check("ruff", "format", "--check", "--no-cache")
    assert "Success: no issues found" in changed.check("mypy", "--cache-dir", "/dev/null")
    out = changed.check(*PYTEST)
    assert " passed" in out and "skipped" not in out
    report = conformance(changed, tmp_path / "report.json", "--case", "host/*", "--case", "graphs/*/full")
    found = statuses(report)
    assert found["host/memory"] == found["graphs/memory/full"] == "pass" and report["counts"]["fail"] == 0


def test_an_operator_that_is_missing_is_declared(changed: Vendor, tmp_path: Path) -> None:
    case, lacking = "passes/models/qwen3_moe", {"SHORE_LACKS": "aten::histc"}
    report = conformance(changed, tmp_path / "fails.json", "--case", case, passes=False, **lacking)
    (found,) = [each for each in report["cases"] if each["id"] == case]
    assert found["status"] == "fail" and "operator aten::histc is missing" in found["reason"]
    declared = f'ConformanceProfile(not_supported={{"{case}": "aten::histc is missing"}})'
    replace_once(changed.project / PLUGIN, "return ConformanceProfile()", f"return {declared}")
    # One case more: a run in which nothing was judged is no success.
    chosen = ("--case", case, "--case", "host/memory")
    found = statuses(conformance(changed, tmp_path / "declared.json", *chosen, **lacking))
    assert (found[case], found["host/memory"]) == ("not-supported", "pass")


def test_without_autoload_the_plugin_imports_the_extension(changed: Vendor) -> None:
    run = ("core", "run", "--device", DEVICE, "--max-new-tokens", "2")
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = changed.run(*run, **off)
    assert done.returncode != 0 and "shore" in done.stderr
    replace_once(changed.project / PLUGIN, "\nimport torch\n", "\nimport torch\nimport torch_shore  # noqa: F401\n")
    changed.check(*run, **off)
