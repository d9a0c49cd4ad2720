"""tools/house.py and run_modules.py: figures of a small tree whose figures are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from house import measure, spread, to_text
from run_modules import files_on_the_stack, modules_of_a_run
from tests.house.rules import ROOT, plant

TREE = {
    "core/__init__.py": '"""Text."""\n\nX = 1\n',
    "core/a.py": "import core.engine.b\n\n\ndef f(x):\n    if x:\n        return 1\n    return 2\n",
    "core/engine/__init__.py": "",
    "core/engine/b.py": "def g():\n    import core.a\n",
    "core/engine/c.py": "",
    "core/common/__init__.py": "",
    "core/common/passes/__init__.py": "",
    "core/common/passes/sites.py": "",
    "core/common/passes/standard.py": "from core.common.passes.norm.rms import P\nimport core.common.passes.sites\n",
    "core/common/passes/norm/__init__.py": "",
    "core/common/passes/norm/rms.py": "import core.a\nfrom core.common.passes import sites, norm\nP = 1\n",
    "tests/test_a.py": "def test():\n    assert True\n",
}


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    plant(tmp_path, TREE)
    return measure(tmp_path)


def test_the_figures_of_a_known_tree(found: dict[str, Any]) -> None:
    assert found["areas"]["core"] == {"files": 2, "lines": 10, "statements": 6}
    assert found["areas"]["core/engine"] == {"files": 3, "lines": 2, "statements": 2}
    assert found["areas"]["tests, also of plugins and examples"] == {"files": 1, "lines": 2, "statements": 2}
    assert found["folders"]["core/common/passes/norm"]["files"] == 2
    assert found["file_lines"] | {"median": 0} == {"num": 11, "median": 0, "p95": 7, "max": 7, "largest": "core/a.py"}
    assert (found["function_lines"]["max"], found["function_lines"]["largest"]) == (4, "core/a.py:4 f")
    assert found["function_lines"]["num"] == 2
    assert found["loose_in_core"] == ["__init__.py", "a.py"]
    assert found["fullest_folder"]["files"] == 3


def test_circles_and_what_passes_import(found: dict[str, Any]) -> None:
    assert found["circles"] == [("core.a", "core.engine.b")]
    assert found["room_circles"] == [("core/a.py", "core/engine/b.py")]
    assert found["passes"] == {
        "core/common/passes/norm/rms.py": {"framework": 1, "ops": 0, "family": 1, "other": 1, "all": 3}
    }


def test_the_text_names_what_the_figures_hold(found: dict[str, Any]) -> None:
    found["run"] = {"num_modules": 1, "rooms": {"core": 1}, "modules": ["core/a.py"]}
    text = to_text(found)
    for shown in ("core.a <-> core.engine.b", "max 4 (core/a.py:4 f), of 2", "first captured replay: 1", "norm/rms.py"):
        assert shown in text


def test_the_command_prints_json_of_another_checkout(tmp_path: Path) -> None:
    plant(tmp_path, TREE)
    command = [sys.executable, str(ROOT / "tools/house.py"), str(tmp_path), "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed) == json.loads(json.dumps(measure(tmp_path)))


def test_a_percentile_is_a_value_that_is_there() -> None:
    values = {str(value): value for value in range(1, 101)}
    assert spread(values) == {"num": 100, "median": 50.5, "p95": 95, "max": 100, "largest": "100"}
    assert spread({"one": 7}) == {"num": 1, "median": 7, "p95": 7, "max": 7, "largest": "one"}


def test_only_files_whose_functions_have_called_are_on_the_stack(tmp_path: Path) -> None:
    texts = {
        "a.py": "def f(g): return leaf() and g()\n\ndef leaf(): return True\n",
        "b.py": "def g(): return look()\n",
        "c.py": "class C: x = f(g)\nfound = C.x\n",
    }
    plant(tmp_path, texts)
    names: dict[str, Any] = {"look": lambda: files_on_the_stack(sys._getframe(1), (tmp_path,), tmp_path)}
    for name in texts:
        exec(compile((tmp_path / name).read_text(), str(tmp_path / name), "exec"), names)
    assert names["found"] == {"a.py", "b.py"}  # c.py: a class body and a module are no functions
    names["look"] = lambda: files_on_the_stack(sys._getframe(1), (tmp_path / "elsewhere",), tmp_path)
    assert names["f"](names["g"]) == set()


def test_a_checkout_without_core_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="holds no package `core`"):
        modules_of_a_run(tmp_path)


@pytest.mark.slow
def test_a_run_of_this_tree_comes_to_its_replay() -> None:
    opened = modules_of_a_run(ROOT)
    way = {
        "core/cli/run.py",
        "core/host/selection.py",
        "core/compilation/rewrite/manager.py",
        "core/compilation/program.py",
    }
    assert way <= set(opened) and len(opened) <= 40
    assert not [path for path in opened if path.startswith(("core/bench", "core/explain", "plugins/cuda"))]
