"""What the rules of the house share: a rule is a function over a root folder that returns violations.

Each is proven able to fail: it finds nothing in this tree, something in every tree planted against it, and nothing in
the innocent ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from import_graph import Module, read_modules

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("core", "plugins", "conformance", "examples", "tests", "tools", "benchmarks")

Rule = Callable[[Path], list[str]]
Files = Mapping[str, str]
"""Path -> text of the files of a planted tree."""


_read = cache(read_modules)  # a tree does not change while tests look at it


def modules(root: Path, *folders: str) -> dict[str, Module]:
    """Return the modules below the folders of a tree by name; all of ours where none is named."""
    found = _read(root, *SOURCE_FOLDERS)
    chosen = folders or SOURCE_FOLDERS
    return {name: module for name, module in found.items() if any(map(module.path.is_relative_to, chosen))}


def sources(root: Path, *folders: str) -> Iterator[tuple[str, str]]:
    """Yield relative path and text of every Python file of ours, wherever it stands below the given folders."""
    for module in modules(root, *folders).values():
        yield module.path.as_posix(), module.text


def imports(root: Path, *folders: str) -> Iterator[tuple[str, int, str]]:
    """Yield path, line and dotted name of each import; `from a import b` names `a.b`."""
    for module in modules(root, *folders).values():
        yield from ((module.path.as_posix(), line, name) for name, line in module.imported)


def within(name: str, packages: Sequence[str]) -> bool:
    """Tell whether a dotted name is one of the packages or below one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def plant(root: Path, files: Files) -> None:
    """Write the files of a planted tree."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def proofs(
    planted: Mapping[Rule, Sequence[Files]], innocent: Mapping[Rule, Sequence[Files]]
) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Return three tests: this tree keeps the rules, what is planted is found, and the innocent pass."""

    def each(cases: Mapping[Rule, Sequence[Files]]) -> list[tuple[Rule, Files]]:
        return [(rule, files) for rule, trees in cases.items() for files in trees]

    def name(value: object) -> str | None:
        return getattr(value, "__name__", None)

    @pytest.mark.parametrize("rule", planted, ids=name)
    def keeps(rule: Rule) -> None:
        assert rule(ROOT) == []

    @pytest.mark.parametrize(("rule", "files"), each(planted), ids=name)
    def is_found(rule: Rule, files: Files, tmp_path: Path) -> None:
        plant(tmp_path, files)
        assert rule(tmp_path) != []

    @pytest.mark.parametrize(("rule", "files"), each(innocent), ids=name)
    def passes(rule: Rule, files: Files, tmp_path: Path) -> None:
        plant(tmp_path, files)
        assert rule(tmp_path) == []

    return keeps, is_found, passes
