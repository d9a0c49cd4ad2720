"""What was measured on which GPU: the fastest way to compute each op at some sizes, as data.

One JSON file per product name, written by `tools/cuda/tune_cuda.py`: for each op a list of entries with a "shape" and
the
"config" that won there, null where the library that it was compared with did. A GPU without a file has no entries, and
every choice falls back on a default that depends on the sizes alone.
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

MAX_RATIO = 4.0
"""How far the nearest measured size may be from one that is asked for."""

_Items = tuple[tuple[str, Any], ...]


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


def winner(
    op: str, shape: Mapping[str, Any], *, ranged: tuple[str, ...] = (), near: tuple[str, ...] = ()
) -> tuple[bool, Mapping[str, Any] | None]:
    """Return whether an op was measured at this shape, and the configuration that won, None where no kernel here did.

    ranged: sizes that were measured at some values, of which the next larger one holds. near: sizes of which the
    nearest measured one holds, if it is at most `MAX_RATIO` away. All others in `shape` must be equal.
    """
    return _winner(op, tuple(shape.items()), ranged, near)


@functools.lru_cache(maxsize=4096)
def _winner(
    op: str, shape: _Items, ranged: tuple[str, ...], near: tuple[str, ...]
) -> tuple[bool, Mapping[str, Any] | None]:
    asked = dict(shape)

    def ratio(entry: Mapping[str, Any], name: str) -> float:
        known, size = max(entry["shape"][name], 1), max(asked[name], 1)
        return float(max(known / size, size / known))

    def holds(entry: Mapping[str, Any]) -> bool:
        known = entry["shape"]
        if not all(known[name] == size for name, size in shape if name not in (*ranged, *near)):
            return False
        return all(known[name] >= asked[name] for name in ranged) and all(ratio(entry, n) <= MAX_RATIO for n in near)

    found = [entry for entry in table().get(op, ()) if holds(entry)]
    if not found:
        return False, None

    def distance(entry: Mapping[str, Any]) -> list[float]:
        return [*(ratio(entry, name) for name in near), *(entry["shape"][name] for name in ranged)]

    return True, min(found, key=distance)["config"]
