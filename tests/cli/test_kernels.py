"""`core kernels build`: whose kernels are built, for what, and how to use them from the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.cli import main
from core.common.kernel_compilers import KernelCompiler, KernelForms
from core.errors import UsageError
from core.host import selection

asked: list[tuple[str, str, KernelForms]] = []


@contextmanager
def counting() -> Iterator[Any]:
    yield lambda: 0


def compiler(name: str, *, able: bool = True) -> KernelCompiler:
    variable = f"ACME_{name.upper()}_DIR"

    def build(forms: KernelForms) -> Iterator[str]:
        asked.append((name, os.environ.get(variable, ""), forms))
        yield f"{name}_1"
        if name == "broken":
            raise UsageError("building broken_2", found="no compiler", remedy="install one")
        yield f"{name}_2"

    return KernelCompiler(name=name, counting=counting, folder_variable=variable, build=build if able else None)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked.clear()
    compilers = [compiler("jit", able=False), compiler("one"), compiler("two")]
    opened = SimpleNamespace(name="acme", kernel_compilers=compilers)
    monkeypatch.setattr(selection, "select_device", lambda name: opened)
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("ONE", "TWO", "BROKEN"):
        monkeypatch.setenv(f"ACME_{name}_DIR", "")
        monkeypatch.delenv(f"ACME_{name}_DIR")  # and is taken away again after the test


def test_all_that_can_be_built_is_built_into_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "build", "--device", "acme", "--out", str(tmp_path / "made")]) == 0
    forms = KernelForms(dtypes=(torch.bfloat16,), head_sizes=(128,))
    assert asked == [(name, str(tmp_path / "made" / name), forms) for name in ("one", "two")]
    out = capsys.readouterr().out
    assert "one: one_1, " in out and "two: 2 kernels in " in out
    assert f"export ACME_ONE_DIR={tmp_path / 'made' / 'one'}" in out


def test_forms_and_providers_are_those_asked_for(tmp_path: Path) -> None:
    line = ["kernels", "build", "--provider", "two", "--dtype", "float16", "--head-size", "64", "--head-size", "256"]
    assert main([*line, "--window", "--softcap", "--out", str(tmp_path)]) == 0
    ((name, _, forms),) = asked
    assert (name, forms) == (
        "two",
        KernelForms(dtypes=(torch.float16,), head_sizes=(64, 256), window=True, softcap=True),
    )


def test_without_a_folder_they_lie_beside_the_compile_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "build", "--provider", "one"]) == 0
    assert Path(asked[0][1]) == tmp_path / "cache" / "kernels" / "one"
    assert "export" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (["--provider", "jit"], "what builds kernels ahead there: one, two"),
        (["--provider", "none"], "building kernels of none"),
        (["--dtype", "half4"], "torch has no such dtype"),
        (["--dtype", "nn"], "torch has no such dtype"),
    ],
)
def test_what_does_not_exist_is_refused(line: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "build", *line]) == 2
    assert wanted in capsys.readouterr().err and not asked


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened = SimpleNamespace(name="acme", kernel_compilers=[compiler("broken")])
    monkeypatch.setattr(selection, "select_device", lambda name: opened)
    assert main(["kernels", "build"]) == 2
    printed = capsys.readouterr()
    assert "broken_1" in printed.out and "no compiler" in printed.err


def test_a_device_without_such_libraries_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = SimpleNamespace(name="acme", kernel_compilers=[compiler("jit", able=False)])
    monkeypatch.setattr(selection, "select_device", lambda name: opened)
    assert main(["kernels", "build"]) == 2
    assert "what builds kernels ahead there: nothing" in capsys.readouterr().err
