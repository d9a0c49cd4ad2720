"""The backend as torch finds it: by the entry point of pyproject.toml, whether or not the package is installed anew."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import torch

GROUP = "torch_dynamo_backends"
ROOT = Path(__file__).resolve().parents[1]


def with_backend() -> None:
    """Register the backend that pyproject.toml declares, unless torch knows it from an installation."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
    if "core" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(EntryPoint("core", declared["core"], GROUP).load(), name="core")
