"""Whether Python keeps compiled files of the large packages that every start imports."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path

_PACKAGES = ("torch", "sympy", "transformers", "triton")
"""Packages of more than a thousand files each, or nearly; torch imports sympy."""


def uncompiled() -> str:
    """Say which packages Python compiles again at each start, why, and what to do; "" where there are none.

    Python writes compiled files at the first import, unless it is told not to or may not write there. Installers such
    as uv write none themselves. Nothing is imported.
    """
    found = {name: Path(spec.origin) for name in _PACKAGES if (spec := PathFinder.find_spec(name)) and spec.origin}
    lacking = {name: file for name, file in found.items() if not os.path.exists(cache_from_source(str(file)))}
    if sys.dont_write_bytecode:
        why = "Python is told not to write them (PYTHONDONTWRITEBYTECODE)"
    else:
        lacking = {name: file for name, file in lacking.items() if not os.access(_writable_of(file), os.W_OK)}
        why = "this process may not write them"
    if not lacking:
        return ""
    folders = " ".join(str(file.parent) for file in lacking.values())
    return (
        f"Python has no compiled files of {', '.join(lacking)}, and {why}: every start compiles what it imports of "
        f"them, which takes seconds; write them once with `python -m compileall -q {folders}`"
    )


def _writable_of(source: Path) -> Path:
    """Return the folder that Python writes to, or would make, for the compiled files beside or apart from a source."""
    folder = Path(cache_from_source(str(source))).parent
    while not folder.exists():
        folder = folder.parent
    return folder
