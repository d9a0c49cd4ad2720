"""Files that ship inside the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def embedded_model() -> Path:
    """Return the folder of the small trained Llama that ships with `core`; its README states source and licence."""
    return Path(str(files("core") / "assets" / "tiny_llama"))
