"""What is shipped and public: typed packages, the wheel, documented hooks, and names that load on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import core
from core.hookspecs import CoreSpec
from tests.house.rules import ROOT, Files, Rule, modules, plant, proofs

WHEEL_NAMES = {"core", "core_cuda", "core_npu", "core_cpu", "core_conformance"}

PUBLIC_NAMES = [
    "AsyncEngine",
    "CompileOptions",
    "CoreError",
    "Device",
    "Engine",
    "EngineConfig",
    "GraphKey",
    "InputSpec",
    "Program",
    "SamplingParams",
    "__version__",
    "backend_report",
    "capture",
    "compile",
    "eager_break",
    "list_devices",
    "optimize",
    "quantize",
    "select_device",
]


def packages_are_typed(root: Path) -> list[str]:
    config = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    packages = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return [f"{package} has no py.typed" for package in packages if not (root / package / "py.typed").is_file()]


def hooks_are_documented_and_used(root: Path) -> list[str]:
    hooks = [name for name in vars(CoreSpec) if name.startswith("core_")]
    document = (root / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
    defined = {
        node.name
        for module in modules(root, "examples", "plugins", "tests").values()
        if "def core_" in module.text
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef)
    }
    missing = [f"{hook} is not in docs/writing-a-plugin.md" for hook in hooks if f"`{hook}`" not in document]
    return missing + [f"{hook} is implemented by no plugin and no test" for hook in hooks if hook not in defined]


PLANTED: dict[Rule, list[Files]] = {
    packages_are_typed: [{"pyproject.toml": '[tool.hatch.build.targets.wheel]\npackages = ["core"]'}],
    hooks_are_documented_and_used: [{"docs/writing-a-plugin.md": "`core_open_device`"}],
}
INNOCENT: dict[Rule, list[Files]] = {
    packages_are_typed: [
        {"pyproject.toml": '[tool.hatch.build.targets.wheel]\npackages = ["core"]', "core/py.typed": ""}
    ],
}

test_this_tree_keeps_the_rule, test_a_planted_violation_is_found, test_the_innocent_pass = proofs(PLANTED, INNOCENT)


def wheel_names(root: Path, target: Path) -> set[str]:
    """Build the wheel of the project at `root` and return its top-level names, metadata apart."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (wheel,) = target.glob("*.whl")
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    return {name for name in names if not name.endswith(".dist-info")}


def test_the_wheel_holds_the_five_packages(tmp_path: Path) -> None:
    assert wheel_names(ROOT, tmp_path) == WHEEL_NAMES


def test_a_stowaway_in_the_wheel_is_seen(tmp_path: Path) -> None:
    project = '[project]\nname = "x"\nversion = "1"\n[build-system]\nrequires = ["hatchling"]\n'
    project += 'build-backend = "hatchling.build"\n[tool.hatch.build.targets.wheel]\npackages = ["core", "tests"]\n'
    plant(tmp_path, {"pyproject.toml": project, "core/__init__.py": "", "tests/__init__.py": ""})
    assert wheel_names(tmp_path, tmp_path / "dist") == {"core", "tests"}


def test_the_public_names_are_pinned() -> None:
    assert core.__all__ == PUBLIC_NAMES


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if name != "__version__"])
def test_each_public_name_resolves(name: str) -> None:
    assert getattr(core, name).__name__ == name


def modules_after(statement: str, root: Path) -> set[str]:
    """Run `statement` in a process of its own that finds `root` first, and return the modules it has loaded."""
    code = f"import sys; sys.path.insert(0, {str(root)!r}); {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def test_importing_core_is_light() -> None:
    assert not modules_after("import core", ROOT) & {"torch", "pluggy", "rich", "typer"}


def test_a_heavy_import_would_be_seen(tmp_path: Path) -> None:
    plant(tmp_path, {"core/__init__.py": "import pluggy"})
    assert "pluggy" in modules_after("import core", tmp_path)
