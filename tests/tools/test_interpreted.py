"""tools/interpreted.py: the tests in Triton's interpreter are due once a kernel or an op is another than they saw."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import interpreted


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one kernel, one op, and the folder that holds the note."""
    for name in ("plugins/cuda/core_cuda/kernel.py", "core/common/ops/op.py", ".ci/run"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1\n")
    return tmp_path


def ask(checkout: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit status of the script for one option."""
    monkeypatch.setattr(sys, "argv", ["interpreted.py", option])
    return interpreted.main(checkout)


def test_they_are_due_until_noted(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(checkout, "--due", monkeypatch) == 0
    assert ask(checkout, "--note", monkeypatch) == 0
    assert ask(checkout, "--due", monkeypatch) == 1


@pytest.mark.parametrize("name", ["plugins/cuda/core_cuda/kernel.py", "core/common/ops/op.py"])
def test_an_edit_of_a_kernel_or_an_op_makes_them_due(
    name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(checkout, "--note", monkeypatch)
    (checkout / name).write_text("2\n")
    assert ask(checkout, "--due", monkeypatch) == 0
    assert "notes other files" in capsys.readouterr().out


def test_a_moved_kernel_makes_them_due_and_another_file_does_not(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(checkout, "--note", monkeypatch)
    (checkout / "core/common/other.py").write_text("2\n")
    assert ask(checkout, "--due", monkeypatch) == 1
    kernel = checkout / "plugins/cuda/core_cuda/kernel.py"
    kernel.rename(kernel.with_name("renamed.py"))
    assert ask(checkout, "--due", monkeypatch) == 0


def test_no_other_file_of_the_plugin_imports_what_is_outside() -> None:
    """So that the tests in the interpreter can't depend on it."""
    outside = {interpreted.ROOT / name for name in interpreted.OUTSIDE}
    assert all(path.is_file() for path in outside)
    names = "|".join(path.stem for path in outside if "core_cuda" in path.parts)
    imports = re.compile(rf"core_cuda(?:\.ops)?(?:\.(?:{names})\b| import [^\n]*\b(?:{names})\b)")
    others = set((interpreted.ROOT / "plugins/cuda").rglob("*.py")) - outside
    assert len(others) > 50
    assert [path.name for path in sorted(others) if imports.search(path.read_text(encoding="utf-8"))] == []
    assert imports.search("from core_cuda import plugin") and imports.search("import core_cuda.collective")
    assert imports.search("from core_cuda.ops import linear, summing") and imports.search("core_cuda.ops.summing")


def test_an_edit_of_what_is_outside_makes_nothing_due(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(checkout, "--note", monkeypatch)
    (checkout / interpreted.OUTSIDE[0]).write_text("2\n")
    assert ask(checkout, "--due", monkeypatch) == 1
