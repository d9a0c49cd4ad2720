"""The files of one entry of the compile cache: written whole, and read only if every byte is as written."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.compilation.cache.differences import Factors, shown
from core.compilation.cache.folders import refuse_foreign

FACTORS, READS, GRAPHS = "factors.json", "reads.json", "graphs.json"
_CHECKSUMS = "checksums.json"
_LENGTH = 12
"""Number of characters of the checksums' digest that begin an entry's name."""
_OF_PHASE = {"phase", "mode", "graphs"}


class Damaged(Exception):
    """An entry that is not what was written; the text says how."""


class Gone(Damaged):
    """An entry that somebody has removed since it was found."""


def write_files(folder: Path, texts: Mapping[str, str]) -> str:
    """Write the files of an entry, by name, and their checksums; return the required first part of the entry's name.

    Nobody but the user may read them.
    """
    sums = as_json({name: _digest(text.encode()) for name, text in texts.items()})
    for name, text in (*texts.items(), (_CHECKSUMS, sums)):
        with open(folder / name, "w", encoding="utf-8", opener=_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    return _digest(sums.encode())[:_LENGTH]


def read_factors(folder: Path) -> Factors:
    """Return the factors of an entry; raise `Damaged` where they can't be read."""
    found = _load(folder, FACTORS)
    if not all(isinstance(group, dict) for group in found.values()):
        raise Damaged(f"{FACTORS} holds no groups of factors")
    return found


def read_reads(folder: Path) -> dict[str, Any]:
    """Return what an entry's trace read: `names` and `values`; raise `Damaged` if they are missing."""
    found = _load(folder, READS)
    if not isinstance(found.get("names"), list) or not isinstance(found.get("values"), dict):
        raise Damaged(f"{READS} does not say what its trace read")
    return found


def read_graphs(folder: Path) -> dict[str, Any]:
    """Return the graphs of an entry by phase; raise `Damaged` where it has none."""
    found = _load(folder, GRAPHS)
    phases = found.get("phases")
    if not isinstance(phases, list) or not all(map(_holds_graphs, phases)):
        raise Damaged(f"{GRAPHS} holds no graphs by phase")
    return found


def _holds_graphs(phase: object) -> bool:
    return isinstance(phase, dict) and phase.keys() >= _OF_PHASE and bool(phase["graphs"])


def all_factors(folder: Path) -> Factors:
    """Return the factors of an entry, and under `values` what its trace read."""
    values = read_reads(folder)["values"]
    return {**read_factors(folder), "values": {shown(name): str(text) for name, text in values.items()}}


def _load(folder: Path, file: str) -> dict[str, Any]:
    try:
        for each in (folder, folder / _CHECKSUMS, folder / file):
            refuse_foreign(each)
        sums, data = _content(folder / _CHECKSUMS), _content(folder / file)
        wanted = json.loads(sums)[file]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if not folder.exists():
            raise Gone("it was removed meanwhile") from None
        raise Damaged(f"{file} or its checksum can't be read ({type(error).__name__}: {error})") from None
    if not folder.name.startswith(_digest(sums)[:_LENGTH]):
        raise Damaged("its checksums are not those that its name tells")
    if _digest(data) != wanted:
        raise Damaged(f"{file} is not what was written: its checksum differs")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Damaged(f"{file} holds a {type(found).__name__}")
    return found


def _content(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
        raise OSError(f"{path} is no regular file")
    return path.read_bytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def as_json(value: Any) -> str:
    """Return a value as JSON for readers, the same for equal values."""
    return _json(value, 0) + "\n"


def _json(value: Any, depth: int) -> str:
    """Return JSON with one line for what is small: a node, a factor."""
    if not isinstance(value, (Mapping, list)) or not value or depth == 5:
        return json.dumps(value, sort_keys=depth < 2, allow_nan=False)
    end, step = "\n" + " " * depth, "\n" + " " * (depth + 1)
    if isinstance(value, list):
        return "[" + ",".join(step + _json(item, depth + 1) for item in value) + end + "]"
    items = sorted(value.items()) if depth < 2 else value.items()
    return "{" + ",".join(f"{step}{json.dumps(name)}: {_json(item, depth + 1)}" for name, item in items) + end + "}"
