"""core/host/bytecode.py: `core doctor` tells where each start compiles what it imports."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path

import pytest

from core.host import bytecode


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return folder


@pytest.mark.parametrize("told", [True, False])
def test_files_that_python_does_not_keep(told: bool, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", told)
    said = bytecode.uncompiled()
    if told:
        assert "no compiled files of torch" in said and "PYTHONDONTWRITEBYTECODE" in said
        assert f"compileall -q {package}" in said
    else:
        assert not said, "Python writes them at the next import"
    py_compile.compile(str(package / "__init__.py"))
    assert not bytecode.uncompiled()


def test_a_folder_that_can_not_be_written_to(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(bytecode.os, "access", lambda folder, _: Path(folder) != package)
    assert "this process may not write them" in bytecode.uncompiled()


def test_compiled_files_kept_apart_count(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "kept"))
    assert bytecode.uncompiled()
    py_compile.compile(str(package / "__init__.py"))
    assert not bytecode.uncompiled()
