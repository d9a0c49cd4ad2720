"""The rules of the house, each a function over a root folder that returns violations, and each proven able to fail.

A rule is tested twice: on this tree, where it must find nothing, and on a violation planted in a temporary folder.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import core
from core.hookspecs import CoreSpec

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("core", "plugins", "conformance", "examples", "tests", "tools", "benchmarks")
WHEEL_NAMES = {"core", "core_cuda", "core_npu", "core_cpu", "core_conformance"}
MAX_LINES = 400

# What core/common may import of core; the second line only under `if TYPE_CHECKING`: no arrow is drawn at run time.
COMMON_MAY_IMPORT = ("core.common", "core.errors", "core.probe", "core._version")
COMMON_MAY_NAME = ("core.device",)

# Not after a letter: "input" is a word. The whole text counts: names, strings, docstrings and comments.
DEVICE_NAME = re.compile(r"(?<![A-Za-z])(?:cuda|npu)", re.IGNORECASE)
# Files under core/ that may name a device, each with its reason. Examples in help texts say `cpu` or `acme`.
MAY_NAME_DEVICES: dict[str, str] = {}
# Device types of torch and its best-known guests: text that nothing under core/ may branch on. Of them core/ may still
# say `cpu` where it asks for the host's memory, as in `tensor.to("cpu")`.
KINDS_OF_DEVICE = {"cpu", "cuda", "hpu", "meta", "mps", "mtia", "musa", "npu", "xla", "xpu"}
TELLS_TEXTS_APART = {"startswith", "endswith", "get", "fullmatch", "match"}

PUBLIC_NAMES = [
    "CompileOptions",
    "CoreError",
    "Device",
    "GraphKey",
    "InputSpec",
    "Program",
    "__version__",
    "capture",
    "compile",
    "eager_break",
    "list_devices",
    "quantize",
    "select_device",
]

Rule = Callable[[Path], list[str]]


def _sources(root: Path, *folders: str) -> Iterator[tuple[str, str]]:
    """Yield relative path and text of every Python file of ours, wherever it stands below the given folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


@cache
def _imports(text: str) -> tuple[tuple[str, int, bool], ...]:
    """Return (dotted name, line, whether under `if TYPE_CHECKING`) of each import, those by literal name included."""
    return tuple(_imports_below(ast.parse(text), by_call="import_module" in text))


def _imports_below(tree: ast.AST, *, by_call: bool, checking: bool = False) -> Iterator[tuple[str, int, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr) and not by_call:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, checking) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "core.(relative)", node.lineno, checking
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from core import compile` names core.compile; `from core.errors import X` names core.errors.
            names = [f"core.{alias.name}" for alias in node.names] if node.module == "core" else [node.module]
            yield from ((name, node.lineno, checking) for name in names)
        elif isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            literals = [item.value for item in node.args if isinstance(item, ast.Constant)]
            yield from ((str(name), node.lineno, checking) for name in literals)
        under_guard = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        yield from _imports_below(node, by_call=by_call, checking=checking or under_guard)


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _plugin_packages(root: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted((root / "plugins").glob("*/core_*"))}


def host_imports_no_plugin(root: Path) -> list[str]:
    return [
        f"{path}:{line} imports {name}"
        for path, text in _sources(root, "core")
        for name, line, _ in _imports(text)
        if name.partition(".")[0].startswith("core_")
    ]


def common_stands_alone(root: Path) -> list[str]:
    return [
        f"{path}:{line} imports {name}"
        for path, text in _sources(root, "core/common")
        for name, line, checking in _imports(text)
        if _within(name, ("core",))
        and not _within(name, COMMON_MAY_IMPORT)
        and not (checking and _within(name, COMMON_MAY_NAME))
    ]


def plugins_are_strangers(root: Path) -> list[str]:
    packages = _plugin_packages(root)
    return [
        f"{path}:{line} imports {name}"
        for package, folder in packages.items()
        for path, text in _sources(root, folder.relative_to(root).as_posix())
        for name, line, _ in _imports(text)
        if name.partition(".")[0] in packages.keys() - {package}
    ]


def nobody_imports_the_plugins_folder(root: Path) -> list[str]:
    return [
        f"{path}:{line} imports {name}"
        for path, text in _sources(root, *SOURCE_FOLDERS)
        if "plugins" in text
        for name, line, _ in _imports(text)
        if _within(name, ("plugins",))
    ]


def host_names_no_device(root: Path) -> list[str]:
    return [
        f"{path}:{number} says {match.group()!r}"
        for path, text in _sources(root, "core")
        if path not in MAY_NAME_DEVICES
        for number, line in enumerate(text.splitlines(), start=1)
        for match in DEVICE_NAME.finditer(line)
    ]


def host_asks_no_device_type(root: Path) -> list[str]:
    """Find branches on what kind a device is: on its `.type`, on a name given to that, on a literal, on `x.is_cpu`."""
    return [
        f"{path}:{line} {how}"
        for path, text in _sources(root, "core")
        for line, how in _questions_of_kind(ast.parse(text))
    ]


def _questions_of_kind(tree: ast.AST) -> Iterator[tuple[int, str]]:
    nodes = list(ast.walk(tree))
    assigned = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)]
    targets = [
        target
        for node in assigned
        if isinstance(node.value, ast.Attribute) and node.value.attr == "type"
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    types = {target.id for target in targets if isinstance(target, ast.Name)}
    for node in nodes:
        operands = [part for part in _compared(node) for part in ast.walk(part)]
        if any(_is_type(part, types) for part in operands):
            yield node.lineno, "branches on a device's type"  # type: ignore[attr-defined]
        elif literals := sorted(KINDS_OF_DEVICE & {part.value for part in operands if isinstance(part, ast.Constant)}):
            yield node.lineno, f"branches on the device {literals[0]!r}"  # type: ignore[attr-defined]
        elif isinstance(node, ast.Attribute) and node.attr.removeprefix("is_") in KINDS_OF_DEVICE - {node.attr}:
            yield node.lineno, f"asks {node.attr!r}"


def _compared(node: ast.AST) -> list[ast.AST]:
    """Return what a comparison, a `match`, a case, a subscript or a call that tells texts apart looks at."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TELLS_TEXTS_APART:
        return list(node.args)
    return []


def _is_type(part: ast.AST, types: set[str]) -> bool:
    if isinstance(part, ast.Name):
        return part.id in types
    # `Tensor.type` is the method of that name.
    return isinstance(part, ast.Attribute) and part.attr == "type" and ast.unparse(part.value) != "Tensor"


def files_are_short(root: Path) -> list[str]:
    counts = {path: len(text.splitlines()) for path, text in _sources(root, *SOURCE_FOLDERS)}
    return [f"{path} has {count} lines" for path, count in counts.items() if count > MAX_LINES]


def packages_are_typed(root: Path) -> list[str]:
    config = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    packages = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return [f"{package} has no py.typed" for package in packages if not (root / package / "py.typed").is_file()]


def hooks_are_documented_and_used(root: Path) -> list[str]:
    hooks = [name for name in vars(CoreSpec) if name.startswith("core_")]
    document = (root / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
    defined = {
        node.name
        for _, text in _sources(root, "examples", "plugins", "tests")
        if "def core_" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    missing = [f"{hook} is not in docs/writing-a-plugin.md" for hook in hooks if f"`{hook}`" not in document]
    return missing + [f"{hook} is implemented by no plugin and no test" for hook in hooks if hook not in defined]


PLANTED: dict[Rule, list[dict[str, str]]] = {
    host_imports_no_plugin: [
        {"core/a.py": "def f():\n    import core_cpu.runner"},
        {"core/a.py": "from core_cuda import ops"},
        {"core/cli/a.py": "from importlib import import_module\nimport_module('core_acme.plugin')"},
    ],
    common_stands_alone: [
        {"core/common/a.py": "import core.host.selection"},
        {"core/common/graphs/a.py": "from core import compile"},
        {"core/common/a.py": "from core.device import Device"},
        {"core/common/a.py": "from .. import device"},
        {"core/common/a.py": "if not TYPE_CHECKING:\n    from core.device import Device"},
        {"core/common/a.py": "if TYPE_CHECKING:\n    from core.compilation.program import Program"},
    ],
    plugins_are_strangers: [
        {"plugins/x/core_x/a.py": "from core_y.ops import f", "plugins/y/core_y/ops.py": ""},
    ],
    nobody_imports_the_plugins_folder: [{"tests/a.py": "import plugins.cpu"}, {"core/a.py": "from plugins import x"}],
    host_names_no_device: [
        {"core/a.py": "x = torch.cuda.memory_allocated()"},
        {"core/a.py": "if torch.npu: pass"},
        {"core/a.py": "x = 'cuda:0'"},
        {"core/a.py": "if y.is_cuda: pass"},
        {"core/a.py": '"""Wraps an NPUGraph."""'},
        {"core/cli/a.py": "x = 1  # as on CUDA"},
    ],
    host_asks_no_device_type: [
        {"core/a.py": "if tensor.device.type == 'xpu': pass"},
        {"core/a.py": "x = name in torch.device(name).type"},
        {"core/a.py": "match device.type:\n    case 'x': pass"},
        {"core/a.py": "kind = tensor.device.type\nown = kind == name"},
        {"core/a.py": "if (kind := x.device.type) and kind in known: pass"},
        {"core/a.py": "x = device == 'cpu' or f(device)"},
        {"core/a.py": "x = tensor.device == torch.device('cpu')"},
        {"core/a.py": "x = str(device) in ('cpu', 'acme')"},
        {"core/a.py": "match name:\n    case 'x' | 'mps': pass"},
        {"core/a.py": "x = {'xpu': 1}"},
        {"core/a.py": "x = sizes['xpu']"},
        {"core/a.py": "x = name.startswith('cpu')"},
        {"core/a.py": "x = 1 if tensor.is_cpu else 2"},
    ],
    files_are_short: [{"tools/a.py": "x = 1\n" * (MAX_LINES + 1)}],
    packages_are_typed: [{"pyproject.toml": '[tool.hatch.build.targets.wheel]\npackages = ["core"]'}],
    hooks_are_documented_and_used: [{"docs/writing-a-plugin.md": "`core_open_device`"}],
}
INNOCENT: dict[Rule, dict[str, str]] = {
    host_imports_no_plugin: {"core/a.py": "from core.errors import CoreError"},
    common_stands_alone: {"core/common/a.py": "import torch\nif TYPE_CHECKING:\n    from core.device import Device"},
    plugins_are_strangers: {"plugins/x/core_x/a.py": "import core_x.b\nfrom core.errors import CoreError"},
    host_names_no_device: {"core/a.py": "input = 'an input of a barracuda'"},
    host_asks_no_device_type: {
        "core/a.py": "x = node.type\nif type(y) is int or f in (Tensor.to, Tensor.type): pass",
        "core/b.py": "x = y.to('cpu')\nz = torch.device('cpu')\nw = cpu.meta == 1",
    },
}


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_this_tree_keeps_the_rule(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(
    ("rule", "files"),
    [(rule, files) for rule, cases in PLANTED.items() for files in cases],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_violation_is_found(rule: Rule, files: dict[str, str], tmp_path: Path) -> None:
    _plant(tmp_path, files)
    assert rule(tmp_path) != []


@pytest.mark.parametrize(("rule", "files"), INNOCENT.items(), ids=lambda value: getattr(value, "__name__", None))
def test_the_innocent_pass(rule: Rule, files: dict[str, str], tmp_path: Path) -> None:
    _plant(tmp_path, files)
    assert rule(tmp_path) == []


def test_the_rules_see_files() -> None:
    assert len(list(_sources(ROOT, "core"))) > 20
    assert set(_plugin_packages(ROOT)) == {"core_cpu", "core_cuda", "core_npu"}


def _plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


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
    _plant(tmp_path, {"pyproject.toml": project, "core/__init__.py": "", "tests/__init__.py": ""})
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
    _plant(tmp_path, {"core/__init__.py": "import pluggy"})
    assert "pluggy" in modules_after("import core", tmp_path)
