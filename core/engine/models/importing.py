"""Imports transformers without the seconds that it spends on what nothing here uses."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from core.common.collector import is_own_process

_MODELS = "transformers.models"
_FOR_OTHERS = ("scipy", "sklearn")
"""Packages that transformers imports where they are installed, for losses of object detection and for tokens guessed
by an assistant model: a third of its import (scikit-learn brings pandas and scipy.stats). Nothing here uses them."""
_USERS = ("transformers.modeling_utils", "transformers.generation.utils")
"""Modules that every model needs, and with which transformers imports those packages."""


def import_lean() -> ModuleType:
    """Import transformers and its `models`; raise `ModuleNotFoundError` where it is not installed.

    In a command's own process it is imported as if `_FOR_OTHERS` were not installed: there nobody else uses it. Models
    that need these packages themselves find them.
    """
    if _MODELS in sys.modules:
        return importlib.import_module("transformers")
    hidden = _FOR_OTHERS if is_own_process() else ()
    _ask_again(hidden)
    with _listed_quickly(), _hidden(hidden):
        transformers = importlib.import_module("transformers")
        _import_models(transformers)
        for name in _USERS if hidden else ():
            importlib.import_module(name)
    _ask_again(hidden)
    return transformers


def _ask_again(names: Sequence[str]) -> None:
    """Have transformers, where a part of it is imported, forget whether these packages are installed: it asks once."""
    checks = sys.modules.get("transformers.utils.import_utils")
    for name in names:
        forget = getattr(getattr(checks, f"is_{name}_available", None), "cache_clear", None)
        if forget is not None:
            forget()


def _import_models(transformers: ModuleType) -> None:
    """Import `transformers.models` with the list of its public names that `transformers` has already made.

    transformers reads all files of its models to make this list, which takes a tenth of a warm start. It would do so
    again here: it keeps what it found under a prefix that the second request does not have.
    """
    lists: Any = importlib.import_module("transformers.utils.import_utils")
    define, folder = lists.define_import_structure, Path(str(transformers.__file__)).parent / "models"
    known = {
        needs: {name.removeprefix("models."): names for name, names in found.items() if name.startswith("models.")}
        for needs, found in define(folder, prefix="models").items()
    }

    def define_once(path: str, prefix: str | None = None) -> Any:
        return known if prefix is None and Path(path) == folder / "__init__.py" else define(path, prefix)

    lists.define_import_structure = define_once
    try:
        importlib.import_module(_MODELS)
    finally:
        lists.define_import_structure = define


@contextmanager
def _hidden(names: Sequence[str]) -> Iterator[None]:
    """Have Python find none of these packages for the block; those already imported stay as they are."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None stands for a module that isn't there
    try:
        yield
    finally:
        for name in absent:
            if sys.modules.get(name) is None:
                sys.modules.pop(name, None)


@contextmanager
def _listed_quickly() -> Iterator[None]:
    """Answer for the block which distributions hold a package without asking for each of their files."""
    library = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = packages_distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = library


def packages_distributions() -> dict[str, list[str]]:
    """Return the names of the installed distributions by the top packages they hold, as `importlib.metadata` does.

    From Python 3.12 on the library asks the file system for every file of every distribution, 15,000 in torch: that is
    a tenth of a warm start. Here a top folder stands for its files. A distribution that can't be read counts as holding
    nothing.
    """
    found: dict[str, list[str]] = {}
    for each in importlib.metadata.distributions():
        try:
            names = (each.read_text("top_level.txt") or "").split() or _top_names(each)
            stated = re.search(r"^Name: *(\S+)", each.read_text("METADATA") or "", re.MULTILINE)
            distribution = stated[1] if stated else each.metadata["Name"]
        except Exception:
            continue
        for name in names:
            found.setdefault(name, []).append(distribution)
    return found


def _top_names(distribution: importlib.metadata.Distribution) -> list[str]:
    record = distribution.read_text("RECORD")
    if record is None:
        tops = {(path.parts[0], len(path.parts) > 1) for path in distribution.files or ()}
    else:
        tops = {(top, bool(below)) for top, below in re.findall(r'^"?([^/,"\n]+)(/?)', record, re.MULTILINE)}
    names = {
        top if is_folder else inspect.getmodulename(top) or top
        for top, is_folder in tops
        if os.path.exists(distribution.locate_file(top))  # type: ignore[arg-type]
    }
    return sorted(name for name in names if "." not in name)
