"""For tests of the plugin's kernels: skipped with the reason where this machine can't build them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from core.common.ops.declaration import CanonicalOp
from core_cpu import extension


@pytest.fixture(scope="session")
def kernels() -> None:
    if reason := extension.why_not():
        pytest.skip(reason)


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[Any]]:
    """Build the kernels with one place of their source changed, and give them as ops of a namespace of their own.

    fewer: a text of the source and what it becomes besides, so that less is compiled.
    """

    @contextmanager
    def planted(right: str, wrong: str, op: CanonicalOp, fewer: tuple[str, str] = ("", "")) -> Iterator[Any]:
        # A library stays loaded, and so each has another namespace.
        name = f"core_cpu_{uuid4().hex}"
        sources = Path(shutil.copytree(extension.SOURCES, tmp_path / "csrc"))
        changed = 0
        for path in sources.iterdir():
            text = path.read_text()
            changed += text.count(right)
            text = text.replace(right, wrong).replace("(core_cpu,", f"({name},")
            path.write_text(text.replace(*fewer) if fewer[0] else text)
        assert changed == 1
        with torch.library._scoped_library(name, "DEF") as library:
            library.define(op.schema)
            monkeypatch.setattr(extension, "SOURCES", sources)
            monkeypatch.setattr(extension, "SOURCE_DIGESTS", extension._digests())
            extension._compile(tmp_path / "wrong.so", op.name, name)
            torch.ops.load_library(tmp_path / "wrong.so")
            yield getattr(torch.ops, name)

    return planted
