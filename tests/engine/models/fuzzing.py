"""Model folders with something wrong in them, drawn from a seed: the embedded model with one or two mutations."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.engine.models.assets import embedded_model

JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
WEIGHTS = "model.safetensors"
ODD: tuple[Any, ...] = (
    *(None, True, False, "", "x", "../x", "\0", "caf\udce9", "9" * 5000, "x" * 5000),
    *(0, 1, -1, 2**31, 2**63, 10**9, 10**18, 10**300, -(10**300), 0.5, -1.5, 1e308),
    *([], {}, [None], ["x"], [[]], {"x": 1}, [10**12], [1] * 1000),
)
RAW = (b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 5000, b"9" * 5000, b"{}")


def make_wrong(folder: Path, seed: int) -> str:
    """Make a folder that holds the embedded model with mutations; return what they are."""
    source = random.Random(seed)
    shutil.copytree(embedded_model(), folder)
    kinds = (_field, _field, _field, _field, _remove, _raw, _header, _header, _bytes, _index)
    return "; ".join(source.choice(kinds)(folder, source) for _ in range(source.choice((1, 1, 2))))


def _field(folder: Path, source: random.Random) -> str:
    file = folder / source.choice(("config.json", *JSON_FILES))
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return f"{file.name} left as it is"
    if not isinstance(content, dict) or not content:
        return f"{file.name} left as it is"
    path, value = [source.choice(list(content))], source.choice(ODD)
    inner = content
    while isinstance(inner[path[-1]], dict) and inner[path[-1]] and source.random() < 0.7:
        inner = inner[path[-1]]
        path.append(source.choice(list(inner)))
    inner[path[-1]] = value
    file.write_text(_dumps(content))
    return f"{file.name}: {'.'.join(path)}={_dumps(value)[:60]}"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)


def _remove(folder: Path, source: random.Random) -> str:
    file = folder / source.choice((*JSON_FILES, WEIGHTS))
    file.unlink(missing_ok=True)
    return f"no {file.name}"


def _raw(folder: Path, source: random.Random) -> str:
    file, content = folder / source.choice((*JSON_FILES, WEIGHTS)), source.choice(RAW)
    file.write_bytes(content)
    return f"{file.name} holds {content[:20]!r} ({len(content)} bytes)"


def _header(folder: Path, source: random.Random) -> str:
    file = folder / WEIGHTS
    try:
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        name = source.choice([key for key in header if key != "__metadata__"])
    except (OSError, ValueError, IndexError, struct.error):
        return "weights left as they are"
    what = source.choice(("dtype", "shape", "data_offsets", "entry", "name", "offset", "metadata"))
    changes: dict[str, Callable[[], object]] = {
        "entry": lambda: header.update({name: source.choice(ODD)}),
        "name": lambda: header.update({source.choice(("", "x", "x" * 3000)): header.pop(name)}),
        "offset": lambda: header[name]["data_offsets"].__setitem__(source.randrange(2), source.choice(ODD)),
        "metadata": lambda: header.update({"__metadata__": source.choice(ODD)}),
    }
    changes.get(what, lambda: header[name].update({what: source.choice(ODD)}))()
    text = _dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"header: {what} of {name}"


def _bytes(folder: Path, source: random.Random) -> str:
    file = folder / WEIGHTS
    if not file.exists() or not (size := file.stat().st_size):
        return "weights left as they are"
    kind = source.choice(("cut", "longer", "length", "nan"))
    with file.open("r+b") as stream:
        if kind == "cut":
            stream.truncate(source.randrange(size))
        elif kind == "longer":
            stream.seek(0, os.SEEK_END)
            stream.write(b"\0" * source.randrange(1, 100))
        elif kind == "length":
            stream.write(struct.pack("<Q", source.choice((0, 1, size, 2**40, 2**64 - 1))))
        else:
            stream.seek(max(0, size - 4 * source.randrange(1, 1000)))
            stream.write(struct.pack("<f", float("nan")))
    return f"weights: {kind}"


def _index(folder: Path, source: random.Random) -> str:
    if (folder / WEIGHTS).exists():
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    shard = source.choice(("model-00001-of-00001.safetensors", *ODD))
    table = source.choice(({"model.norm.weight": shard}, {"x": shard}, source.choice(ODD)))
    content = source.choice(({"weight_map": table}, {"weight_map": table}, {"metadata": {}, "weights": table}))
    (folder / f"{WEIGHTS}.index.json").write_text(_dumps(content))
    return f"index: {_dumps(content)[:60]}"
