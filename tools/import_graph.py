"""Who imports whom in a checkout, read from its source: modules, arrows, rooms and circles. Nothing is imported.

An import counts wherever it stands: at the top, inside a function, under `if TYPE_CHECKING`, or by a literal name given
to `import_module`. A package counts as the module that its `__init__.py` is.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import networkx

SOURCES = ("core", "plugins", "conformance", "examples", "tools", "scripts", "benchmarks", "tests")
"""Folders of a checkout that hold Python of ours; those that it lacks are left out."""

HALLS = (
    "core",
    "core/common",
    "core/common/ops",
    "core/common/passes",
    "core/compilation",
    "core/engine",
    "plugins/cpu/core_cpu",
    "plugins/cuda/core_cuda",
    "plugins/cuda/core_cuda/ops",
    "plugins/npu/core_npu",
    "plugins/npu/core_npu/passes",
    "conformance/core_conformance",
    "examples/acme_device/core_acme",
)
"""Folders between whose rooms people walk: a module that lies loose in one counts as a room of its own."""

Arrows = Mapping[str, frozenset[str]]
"""What imports -> what it imports."""


@dataclass(frozen=True)
class Module:
    """One file. name: as it is imported; path: in the checkout."""

    name: str
    path: PurePosixPath
    tree: ast.Module
    text: str

    @property
    def folder(self) -> str:
        """The folder that the file lies in, as `core/engine/paged`."""
        return self.path.parent.as_posix()

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__.py` of its folder."""
        return self.path.name == "__init__.py"

    @cached_property
    def imported(self) -> tuple[tuple[str, int], ...]:
        """Dotted name and line of each import; for `from a import b`, `a.b`, which may be a module or not."""
        return tuple(self._imported())

    def _imported(self) -> Iterator[tuple[str, int]]:
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        # A call may stand anywhere; without one only statements are looked at, a tenth of all nodes.
        for node in ast.walk(self.tree) if "import_module" in self.text else _statements(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                start = ".".join([*above, node.module] if node.module else above)
                yield from ((f"{start}.{alias.name}", node.lineno) for alias in node.names)
            elif isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
                literals = [item.value for item in node.args if isinstance(item, ast.Constant)]
                yield from ((name, node.lineno) for name in literals if isinstance(name, str))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements of a module however deep, and what holds them (handlers, cases), outer ones first."""
    level: list[ast.AST] = list(tree.body)
    while level:
        yield from level
        fields = ("body", "handlers", "orelse", "finalbody", "cases")
        level = [inner for node in level for field in fields for inner in getattr(node, field, ())]


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def read_modules(root: Path, *folders: str) -> dict[str, Module]:
    """Return the modules below these folders by name; all folders of `SOURCES` where none is named."""
    found = {}
    for path in sorted(_files(root, folders or SOURCES)):
        text = (root / path).read_text(encoding="utf-8")
        name = _name(root, path)
        found[name] = Module(name, path, ast.parse(text), text)
    return found


def _files(root: Path, folders: Iterable[str]) -> set[PurePosixPath]:
    """Return the Python files: those that git tracks, all that are there where the root is no repository."""
    asked = [folder for folder in folders if (root / folder).exists()]
    if not asked:
        return set()
    if (root / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *asked]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    else:
        listed = [path.relative_to(root).as_posix() for folder in asked for path in (root / folder).rglob("*.py")]
    return {PurePosixPath(path) for path in listed if path.endswith(".py") and (root / path).is_file()}


def _name(root: Path, path: PurePosixPath) -> str:
    """Return the name of a module: counted from the folder above its outermost package, or from the root."""
    packages: list[str] = []
    for folder in path.parents:
        if not (root / folder / "__init__.py").is_file() or folder == PurePosixPath("."):
            break
        packages.insert(0, folder.name)
    parts = [*packages, path.stem] if packages else list(path.with_suffix("").parts)
    return ".".join(parts[:-1] if path.name == "__init__.py" else parts)


def imports(modules: Mapping[str, Module], module: Module) -> Iterator[tuple[str, int]]:
    """Yield the modules of the checkout that a module imports, each with the line."""
    for name, line in module.imported:
        target = _resolve(modules, module, name)
        if target is not None and target != module.name:
            yield target, line


def _resolve(modules: Mapping[str, Module], module: Module, name: str) -> str | None:
    """Return the module that a name leads to: itself, what holds it, or a file beside or above the importing one."""
    loose = [folder.as_posix().replace("/", ".") for folder in module.path.parents[:-1]]
    for prefix in ("", *(f"{folder}." for folder in loose)):
        for candidate in (f"{prefix}{name}", f"{prefix}{name}".rpartition(".")[0]):
            if candidate in modules and (not prefix or not modules[candidate].is_package):
                return candidate
    return None


def arrows(modules: Mapping[str, Module]) -> Arrows:
    """Return what each module imports of the others."""
    return {name: frozenset(target for target, _ in imports(modules, module)) for name, module in modules.items()}


def rooms(modules: Mapping[str, Module]) -> dict[str, str]:
    """Return the room of each module: its folder, or its own path where it lies loose in a hall."""
    return {
        name: module.path.as_posix() if module.folder in HALLS else module.folder for name, module in modules.items()
    }


def between_rooms(module_arrows: Arrows, room_of: Mapping[str, str]) -> Arrows:
    """Return what each room imports of the others."""
    found: dict[str, set[str]] = {room: set() for room in room_of.values()}
    for name, targets in module_arrows.items():
        found[room_of[name]] |= {room_of[target] for target in targets} - {room_of[name]}
    return {room: frozenset(targets) for room, targets in found.items()}


def circles(graph: Arrows) -> list[tuple[str, ...]]:
    """Return the sets of nodes that reach each other, largest first; none where the graph has no circle."""
    edges = networkx.DiGraph((node, target) for node, targets in graph.items() for target in targets)
    found = (tuple(sorted(members)) for members in networkx.strongly_connected_components(edges) if len(members) > 1)
    return sorted(found, key=lambda members: (-len(members), members))
