"""Checks a model folder before a model library sees it, so that each fault has one precise error.

Nothing here imports a model library or reads a weight; only names, sizes and headers are looked at.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.engine.models.statements import parse_json, too_many_layers, wrong_field
from core.engine.models.weights_header import Contents, first, read_header
from core.errors import ModelError

Progress = Callable[[str, int, int], None]
"""`(stage, done, total)`; `total` counts files in the stage "check files" and tensors in the stage "load weights"."""

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_VOCABULARY_FILE = re.compile(r"tokenizer\.json|.*\.model|.*\.tiktoken|tekken\.json|vocab\.(json|txt)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model folder whose files are present and complete."""

    path: Path
    #: The content of `config.json`.
    config: dict[str, Any]
    #: The safetensors files to read.
    weight_files: tuple[Path, ...]
    #: The tensors in these files.
    contents: Contents
    #: Whether the folder has a file from which a tokenizer can be made; `tokenizer_config.json` alone is none.
    has_vocabulary: bool


def asked_for(path: Path) -> str:
    """Return the first line of every error about the model folder `path`."""
    return f"load model {str(path)!r}"


def inspect_checkpoint(path: Path, progress: Progress | None = None) -> Checkpoint:
    """Check a model folder and return what it holds; raises ModelError for the first fault, naming the file."""
    check_folder(path)
    config = read_config(path)
    if (path / "generation_config.json").is_file():
        read_stated(path, "generation_config.json")
    weight_map = find_weights(path, config)
    held = []
    for done, (file, expected) in enumerate(weight_map.items()):
        if progress is not None:
            progress("check files", done, len(weight_map))
        held.append(check_safetensors(path, file, expected))
    contents = Contents(
        num_tensors=sum(each.num_tensors for each in held),
        num_elements=sum(each.num_elements for each in held),
        num_bytes=sum(each.num_bytes for each in held),
    )
    if layers := too_many_layers(config, contents.num_tensors):  # every layer has at least one tensor
        raise ModelError(
            asked_for(path),
            found=f"config.json states {layers}, and the weights are {contents.num_tensors} tensors in all",
            remedy="use the config.json and the weights of one and the same model",
        )
    if progress is not None:
        progress("check files", len(weight_map), len(weight_map))
    names = [entry.name for entry in path.iterdir()]
    return Checkpoint(
        path=path,
        config=config,
        weight_files=tuple(weight_map),
        contents=contents,
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
        content = parse_json(file.read_bytes())
    except ValueError as error:
        raise ModelError(asked_for(path), found=f"{file.name} is not JSON: {error}", remedy=remedy) from None
    if not isinstance(content, dict):
        found = f"{file.name} holds a JSON {type(content).__name__}, not an object"
        raise ModelError(asked_for(path), found=found, remedy=remedy)
    return content


def read_stated(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of the model folder `path`; raise ModelError for a field of the wrong kind."""
    content = read_json(path, path / name)
    if problem := wrong_field(name, content):
        raise ModelError(asked_for(path), found=problem, remedy=f"correct it, or copy {name} again")
    return content


def read_config(path: Path) -> dict[str, Any]:
    """Return `config.json` of the model folder `path`, or raise ModelError."""
    if (path / "adapter_config.json").is_file():
        # Without the adapter library the base weights would load alone, as if the adapter were not there.
        raise ModelError(
            asked_for(path),
            found="adapter_config.json: the folder holds an adapter, and no model",
            remedy="load its base model, and the adapter by `core serve --lora NAME=FOLDER` or `Engine.load_lora`, or "
            "merge both first (peft: `merge_and_unload()`, then `save_pretrained`)",
        )
    if (path / "config.json").is_file():
        return read_stated(path, "config.json")
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
        if os.path.isfile(path / name):
            return _read_index(path, path / name) if name.endswith(".index.json") else {path / name: set()}
    safetensors = sorted(entry.name for entry in path.glob("*.safetensors"))
    others = sorted(entry.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for entry in path.glob(pattern))
    if safetensors:
        raise ModelError(
            asked_for(path),
            found=f"neither {' nor '.join(map(repr, names))}, only {first(safetensors)}",
            remedy=f"name the weights {WEIGHTS_NAME!r}, or add the index {INDEX_NAME!r} that lists its shards",
        )
    if others:
        raise ModelError(
            asked_for(path),
            found=f"no safetensors weights, only {first(others)}",
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
    missing = sorted(file.name for file in files if not os.path.isfile(file))
    if missing:
        raise ModelError(
            asked_for(path),
            found=f"{len(missing)} of the {len(files)} shards named in {index.name} are missing: {first(missing)}",
            remedy="copy the missing shards into the folder",
        )
    return dict(sorted(files.items()))


def check_safetensors(path: Path, file: Path, expected: set[str]) -> Contents:
    """Return what a whole safetensors file holds; raise ModelError where it is damaged or lacks an expected tensor."""
    found = read_header(file, expected)
    if isinstance(found, str):
        raise ModelError(
            asked_for(path),
            found=f"{file.name} is damaged: {found}",
            remedy=f"copy {file.name} again and compare its size",
        )
    return found
