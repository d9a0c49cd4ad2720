"""What lies in a model folder: checked before a model library sees it, so that each fault has one precise error.

Nothing here imports a model library or reads a weight; only names, sizes and headers are looked at.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ModelError

Progress = Callable[[str, int, int], None]
"""`(stage, done, total)`; `total` counts files in the stage "check files" and tensors in the stage "load weights"."""

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# https://github.com/huggingface/safetensors#format: eight bytes of length, a JSON header, then the tensors end to end.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
_VOCABULARY_FILE = re.compile(r"tokenizer\.json|.*\.model|.*\.tiktoken|tekken\.json|vocab\.(json|txt)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model folder whose files are present and whole.

    config: `config.json` as it stands. weight_files: the safetensors files to read. has_vocabulary: some file there can
    make a tokenizer; `tokenizer_config.json` alone cannot.
    """

    path: Path
    config: dict[str, Any]
    weight_files: tuple[Path, ...]
    has_vocabulary: bool


def asked_for(path: Path) -> str:
    """Return the first line of every error about the model folder `path`."""
    return f"load model {str(path)!r}"


def inspect_checkpoint(path: Path, progress: Progress | None = None) -> Checkpoint:
    """Check a model folder and return what it holds; raises ModelError for the first fault, naming the file."""
    check_folder(path)
    config = read_config(path)
    if (path / "generation_config.json").is_file():
        read_json(path, path / "generation_config.json")
    weight_map = find_weights(path, config)
    for done, (file, expected) in enumerate(weight_map.items()):
        if progress is not None:
            progress("check files", done, len(weight_map))
        check_safetensors(path, file, expected)
    if progress is not None:
        progress("check files", len(weight_map), len(weight_map))
    names = [entry.name for entry in path.iterdir()]
    return Checkpoint(
        path=path,
        config=config,
        weight_files=tuple(weight_map),
        has_vocabulary=any(_VOCABULARY_FILE.fullmatch(name) for name in names),
    )


def check_folder(path: Path) -> None:
    """Raise ModelError unless `path` is a folder that can be listed, with the closest sibling where it is absent."""
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise ModelError(
                asked_for(path), found="the folder may not be read", remedy="give yourself read access to it"
            )
        return
    if path.exists():
        raise ModelError(
            asked_for(path), found="it is a file, not a folder", remedy=f"pass its folder: {str(path.parent)!r}"
        )
    parent = path.parent
    if not parent.is_dir():
        remedy = "pass a local folder; models are never downloaded"
        if not path.is_absolute() and len(path.parts) == 2:  # it looks like the name of a model on a hub
            remedy += f": fetch it first, for example with `hf download {path} --local-dir <folder>`"
        raise ModelError(
            asked_for(path), found=f"no such folder, and {str(parent)!r} does not exist either", remedy=remedy
        )
    siblings = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    close = difflib.get_close_matches(path.name, siblings, n=1)
    remedy = f"did you mean {str(parent / close[0])!r}?" if close else "pass the folder that holds config.json"
    raise ModelError(asked_for(path), found=f"no such folder in {str(parent)!r}", remedy=remedy)


def read_json(path: Path, file: Path) -> dict[str, Any]:
    """Return the JSON object in `file` of the model folder `path`, or raise ModelError."""
    remedy = f"copy {file.name} again from where the model came"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(asked_for(path), found=f"{file.name} is not JSON: {error}", remedy=remedy) from None
    if not isinstance(content, dict):
        found = f"{file.name} holds a JSON {type(content).__name__}, not an object"
        raise ModelError(asked_for(path), found=found, remedy=remedy)
    return content


def read_config(path: Path) -> dict[str, Any]:
    """Return `config.json` of the model folder `path`, or raise ModelError."""
    if (path / "adapter_config.json").is_file():
        # Without the adapter library the base weights would load alone, as if the adapter were not there.
        raise ModelError(
            asked_for(path),
            found="adapter_config.json: the folder holds an adapter, which is not applied here",
            remedy="merge it into its base model first (peft: `merge_and_unload()`, then `save_pretrained`)",
        )
    if (path / "config.json").is_file():
        return read_json(path, path / "config.json")
    if not any(path.iterdir()):
        found, remedy = "the folder is empty", "pass the folder that holds config.json"
    else:
        inside = sorted(entry.parent.name for entry in path.glob("*/config.json"))
        found = "no config.json in the folder"
        remedy = f"did you mean its folder {inside[0]!r}?" if inside else "pass the folder that holds config.json"
    raise ModelError(asked_for(path), found=found, remedy=remedy)


def find_weights(path: Path, config: dict[str, Any]) -> dict[Path, set[str]]:
    """Return the weight files with the tensors that the index promises in each; an empty set promises nothing.

    The order of preference is transformers' own: the file that the configuration names as `transformers_weights`,
    `model.safetensors`, the index.
    """
    explicit = config.get("transformers_weights")
    names = [explicit] if isinstance(explicit, str) else [WEIGHTS_NAME, INDEX_NAME]
    for name in names:
        if (path / name).is_file():
            return _read_index(path, path / name) if name.endswith(".index.json") else {path / name: set()}
    safetensors = sorted(entry.name for entry in path.glob("*.safetensors"))
    others = sorted(entry.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for entry in path.glob(pattern))
    if safetensors:
        raise ModelError(
            asked_for(path),
            found=f"neither {' nor '.join(map(repr, names))}, only {_first(safetensors)}",
            remedy=f"name the weights {WEIGHTS_NAME!r}, or add the index {INDEX_NAME!r} that lists its shards",
        )
    if others:
        raise ModelError(
            asked_for(path),
            found=f"no safetensors weights, only {_first(others)}",
            remedy="convert the weights to safetensors: load the model once with transformers and `save_pretrained` it",
        )
    raise ModelError(
        asked_for(path),
        found="no weights in the folder",
        remedy=f"put {WEIGHTS_NAME!r}, or shards and {INDEX_NAME!r}, there",
    )


def _read_index(path: Path, index: Path) -> dict[Path, set[str]]:
    weight_map = read_json(path, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(
            asked_for(path),
            found=f"{index.name} has no 'weight_map' from tensor names to files",
            remedy=f"copy {index.name} again from where the model came",
        )
    files: dict[Path, set[str]] = {}
    for tensor, file in weight_map.items():
        files.setdefault(path / file, set()).add(tensor)
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise ModelError(
            asked_for(path),
            found=f"{len(missing)} of the {len(files)} shards named in {index.name} are missing: {_first(missing)}",
            remedy="copy the missing shards into the folder",
        )
    return dict(sorted(files.items()))


def check_safetensors(path: Path, file: Path, expected: set[str]) -> None:
    """Raise ModelError unless `file` is a whole safetensors file that holds the `expected` tensors."""
    problem = _header_problem(file, expected)
    if problem is not None:
        raise ModelError(
            asked_for(path),
            found=f"{file.name} is damaged: {problem}",
            remedy=f"copy {file.name} again and compare its size",
        )


def _header_problem(file: Path, expected: set[str]) -> str | None:
    num_bytes = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        if start == b"version ":
            return "it is a Git LFS pointer, not the weights (run `git lfs pull`)"
        if len(start) < _LENGTH_BYTES:
            return f"{num_bytes} bytes are too few for a safetensors header"
        header_bytes = int.from_bytes(start, "little")
        if header_bytes > min(_MAX_HEADER_BYTES, num_bytes - _LENGTH_BYTES):
            return f"its header claims {header_bytes} bytes, the file has {num_bytes}"
        text = stream.read(header_bytes)
    try:
        header = json.loads(text.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"its header is not JSON: {error}"
    if not isinstance(header, dict):
        return f"its header is a JSON {type(header).__name__}, not an object"
    header.pop("__metadata__", None)
    absent = sorted(expected - header.keys())
    if absent:
        return f"the index promises tensors that it does not hold: {_first(absent)}"
    return _extent_problem(header, num_bytes - _LENGTH_BYTES - header_bytes)


def _extent_problem(header: dict[str, Any], data_bytes: int) -> str | None:
    extents: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            num_bits = math.prod(shape) * _DTYPE_BITS.get(dtype, 0)
            extents.append((int(begin), int(end), name))
        except (KeyError, TypeError, ValueError):
            return f"the header's entry for tensor {name!r} is malformed"
        if dtype in _DTYPE_BITS and num_bits != 8 * (end - begin):
            return f"tensor {name!r} of dtype {dtype} and shape {shape} does not fill its {end - begin} bytes"
    position = 0
    for begin, end, name in sorted(extents):
        if begin != position:
            return f"tensor {name!r} begins at byte {begin} of the data, not at {position}"
        position = end
    if position != data_bytes:
        return f"its tensors need {position} bytes of data, the file has {data_bytes}"
    return None


def _first(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(map(repr, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
