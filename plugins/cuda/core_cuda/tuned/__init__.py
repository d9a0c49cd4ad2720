"""What was measured on which GPU: the fastest way to compute each op for ranges of sizes, as data.

One JSON file per product name, written by `scripts/tune_cuda.py`. A GPU without a file has no entries, and every choice
falls back on a default that depends on the sizes alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch

from core_cuda.ops.launching import INTERPRETED
from core_cuda.ops.skinny_configs import SkinnyConfig

__all__ = ["file_name", "skinny_choice", "table"]

_Key = tuple[int, int, bool]


def file_name(product: str) -> str:
    """Return the name of the file for a GPU, by its product name: "NVIDIA H200" gives "nvidia_h200.json"."""
    return re.sub(r"[^a-z0-9]+", "_", product.lower()).strip("_") + ".json"


@functools.cache
def table() -> Mapping[str, Any]:
    """Return what was measured on the current GPU; empty where nothing was."""
    if INTERPRETED or not torch.cuda.is_available():
        return {}
    file = resources.files(__package__) / file_name(torch.cuda.get_device_name())
    return json.loads(file.read_text()) if file.is_file() else {}


def skinny_choice(rows: int, columns: int, depth: int, *, gated: bool) -> tuple[bool, SkinnyConfig | None]:
    """Return whether these sizes were measured, and the configuration that won; None where cuBLAS did.

    Measured for some numbers of rows each; between them the next larger one holds.
    """
    for most, config in _skinny().get((columns, depth, gated), ()):
        if rows <= most:
            return True, config
    return False, None


@functools.cache
def _skinny() -> Mapping[_Key, tuple[tuple[int, SkinnyConfig | None], ...]]:
    found: dict[_Key, list[tuple[int, SkinnyConfig | None]]] = {}
    for entry in table().get("linear", ()):
        config = SkinnyConfig(**entry["config"]) if entry["config"] else None
        key = (entry["columns"], entry["depth"], entry["gated"])
        found.setdefault(key, []).append((entry["rows"], config))
    return {key: tuple(sorted(entries, key=lambda entry: entry[0])) for key, entries in found.items()}
