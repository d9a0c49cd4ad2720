"""tools/import_graph.py: who imports whom, however it is written, and the circles of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from import_graph import arrows, between_rooms, circles, imports, read_modules, rooms
from tests.house.rules import plant


def imported(root: Path, text: str) -> list[str]:
    """Return what a module of a small tree imports."""
    files = {f"core/{name}": "" for name in ("__init__.py", "x/__init__.py", "x/b.py", "c.py")}
    plant(root, {**files, "core/x/a.py": text})
    modules = read_modules(root, "core")
    return [name for name, _ in imports(modules, modules["core.x.a"])]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import core.x.b", ["core.x.b"]),
        ("from core.x.b import f", ["core.x.b"]),
        ("from core.x import b, f", ["core.x.b", "core.x"]),
        ("from core import compile", ["core"]),
        ("from . import b", ["core.x.b"]),
        ("from .b import f", ["core.x.b"]),
        ("from ..c import f", ["core.c"]),
        ("def f():\n    from core.c import g", ["core.c"]),
        ("if TYPE_CHECKING:\n    from core.c import g", ["core.c"]),
        ("import importlib\nimportlib.import_module('core.c')", ["core.c"]),
        ("import core.x.a", []),
        ("import torch, core_cpu\nfrom importlib import import_module\nimport_module(name)", []),
    ],
)
def test_every_way_to_import_counts(text: str, wanted: list[str], tmp_path: Path) -> None:
    assert imported(tmp_path, text) == wanted


def test_packages_are_named_from_the_folder_above_them_and_scripts_find_their_neighbours(tmp_path: Path) -> None:
    package = {"plugins/x/core_x/__init__.py": "", "plugins/x/core_x/a.py": "import core.c"}
    plant(tmp_path, {**package, "core/c.py": "", "tools/d.py": "from e import f", "tools/e.py": "import core_x.a"})
    modules = read_modules(tmp_path)
    assert set(modules) == {"core_x", "core_x.a", "core.c", "tools.d", "tools.e"}
    assert arrows(modules)["core_x.a"] == {"core.c"}
    assert arrows(modules)["tools.d"] == {"tools.e"} and arrows(modules)["tools.e"] == {"core_x.a"}


def graph(*pairs: str) -> dict[str, frozenset[str]]:
    return {name: frozenset(targets) for name, _, targets in (pair.partition(">") for pair in pairs)}


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        (("a>b", "b>c", "c>"), []),
        (("a>b", "b>a"), [("a", "b")]),
        (("a>bc", "b>d", "c>d", "d>"), []),
        (("a>b", "b>c", "c>ad", "d>e", "e>d", "f>a"), [("a", "b", "c"), ("d", "e")]),
        (("a>b", "b>cd", "c>a", "d>b"), [("a", "b", "c", "d")]),
    ],
)
def test_circles_are_what_reaches_itself(pairs: tuple[str, ...], wanted: list[tuple[str, ...]]) -> None:
    assert circles(graph(*pairs)) == wanted


def test_a_module_in_a_hall_is_a_room_and_others_share_their_folder(tmp_path: Path) -> None:
    plant(tmp_path, {"core/a.py": "import core.x.b", "core/x/b.py": "import core.x.c", "core/x/c.py": ""})
    modules = read_modules(tmp_path, "core")
    assert rooms(modules) == {"core.a": "core/a.py", "core.x.b": "core/x", "core.x.c": "core/x"}
    assert between_rooms(arrows(modules), rooms(modules)) == {"core/a.py": {"core/x"}, "core/x": frozenset()}
