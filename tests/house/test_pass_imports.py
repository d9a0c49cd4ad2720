"""A fusion is written with two modules of core: `core.common.passes`, and one that holds the ops it knows.

Helpers of the fusion's own, or of a family of passes, come on top.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.common import passes

ROOT = Path(__file__).resolve().parents[2]
PASSES = ROOT / "core/common/passes"
FAMILIES = {path.parent.name for path in PASSES.glob("*/__init__.py")}
OPS = {path.parent.name for path in (ROOT / "core/common/ops").glob("*/__init__.py")} | {"canonical"}
FRAMEWORK = "core.common.passes"
TEMPLATE = ROOT / "core/scaffold/templates/package/passes.py.jinja"


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of what a module takes from core."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("core."):
            yield from ((str(node.module), alias.name) for alias in node.names)


def violations(text: str) -> list[str]:
    """Return what a fusion imports besides; nothing for modules that are none."""
    found = list(imported(text))
    if not any(name == "Site" for _, name in found):
        return []
    modules = dict.fromkeys(module for module, _ in found)
    ops = [module for module in modules if module.startswith("core.common.ops")]
    helpers = [module for module in modules if module.removeprefix(f"{FRAMEWORK}.").split(".")[0] in FAMILIES]
    wrong = [module for module in modules if module not in (FRAMEWORK, *ops, *helpers)]
    wrong += [module for module in ops if module.removeprefix("core.common.ops.") not in OPS]
    return wrong + (ops if len(ops) > 1 else [])


def sources() -> list[Path]:
    folders = [PASSES / family for family in sorted(FAMILIES)]
    folders += [path for path in (ROOT / "plugins").glob("*/core_*/passes") if path.is_dir()]
    return [
        *(path for folder in folders for path in sorted(folder.rglob("*.py"))),
        *(ROOT / "examples/acme_device/core_acme").rglob("passes.py"),
        TEMPLATE,
    ]


def text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text.replace("{{ package }}", "package") if path.suffix == ".jinja" else text


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_fusion_imports_the_framework_from_one_place_and_its_ops_from_one(path: Path) -> None:
    assert violations(text_of(path)) == []


def test_there_are_fusions_to_look_at() -> None:
    assert sum(any(name == "Site" for _, name in imported(text_of(path))) for path in sources()) > 20


@pytest.mark.parametrize(
    "line",
    [
        "from core.common.passes.rewrite import fuse",
        "from core.common.ops.norm.norms import RMS_NORM",
        "from core.common.ops.norm import RMS_NORM\nfrom core.common.ops.rotary import ROTARY",
        "from core.common.node_meta import value_of",
    ],
)
def test_another_import_is_seen(line: str) -> None:
    assert violations(f"from core.common.passes import Site\n{line}") != []
    assert violations(line) == []


@pytest.mark.parametrize("path", [*PASSES.glob("*.py")], ids=lambda path: path.name)
def test_the_framework_takes_itself_from_its_modules(path: Path) -> None:
    assert FRAMEWORK not in [module for module, _ in imported(path.read_text(encoding="utf-8"))]


def test_what_a_type_checker_sees_is_what_is_loaded() -> None:
    told = dict(reversed(pair) for pair in imported((PASSES / "__init__.py").read_text(encoding="utf-8")))
    assert told == passes._EXPORTS
    for name, module in told.items():
        assert getattr(passes, name) is getattr(sys.modules[module], name)
    with pytest.raises(AttributeError, match="no attribute 'fuze'; it has CanonicalOp"):
        getattr(passes, "fuze")  # noqa: B009  # a name that nobody has


def test_importing_the_package_loads_neither_torch_nor_a_pass() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import core.common.passes; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    loaded = set(run.stdout.split())
    assert FRAMEWORK in loaded and not [name for name in loaded if name == "torch" or f"{FRAMEWORK}." in name]
