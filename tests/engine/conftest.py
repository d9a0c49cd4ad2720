"""Fixtures of the loading tests: a pristine tiny model folder, and a copy that a test may break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model folder; read only."""
    from tests.engine.models.folders import make_llama, save_tokenizer

    folder = tmp_path_factory.mktemp("pristine") / "tiny-llama"
    make_llama().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A whole model folder that a test may break."""
    return Path(shutil.copytree(pristine, tmp_path / "tiny-llama"))
