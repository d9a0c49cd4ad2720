"""The model in a folder, from which the processes of peers read configuration and weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.engine.models.hf import driven
from core.quantization.layers import is_quantized


def unreadable(model: Any) -> str:
    """Say why peers can't read the model's weights; "" where they can."""
    return "the folder's weights are codes, which peers can't read" if is_quantized(model) else ""


@contextmanager
def model_folder(model: Any) -> Iterator[Path]:
    """Write configuration and weights into a folder that lives as long as the block."""
    with _folder(model) as folder:
        yield folder


@contextmanager
def config_folder(config: Any, model_class: str, dtype: str) -> Iterator[Path]:
    """Write the configuration alone, for peers that draw weights. model_class: of transformers, which reads it.

    dtype: torch's name of the weights' dtype.
    """
    stated = {"architectures": [model_class], "dtype": dtype, "torch_dtype": dtype}
    with _folder(config) as folder:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | stated, indent=2), encoding="utf-8")
        yield folder


@contextmanager
def _folder(what: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="core-bench-") as name:
        folder = Path(name)
        with driven(None):
            what.save_pretrained(folder)
        _state_old_names(folder / "config.json")
        yield folder


def _state_old_names(path: Path) -> None:
    """Write the rotary base under its old name too: transformers before 5 reads it there, else takes a default."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "default" and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")
