"""The source of whole packages as a factor of the cache: its digest, and its files for a comparison."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.compilation.cache.differences import Place
from core.compilation.cache.load_time import LOAD_TIME


@dataclass(slots=True)
class _Source:
    """The modules of a package that were loaded when its digest was made.

    specs: module specs by module, kept alive because they are compared by identity. reloads: how often a module was
    found to have been loaded again.
    """

    specs: dict[str, Any]
    reloads: int
    digest: str
    place: Place


_sources: dict[str, _Source] = {}


def source_digest(package: str) -> str:
    """Return a digest of all Python source of an importable package, as it was loaded; "" where it has none on disk.

    A file that was changed since this process began may not be the code that runs here: then the digest is unique to
    this process. It changes again after a module is reloaded (`importlib.reload`), which gives the module a new spec.
    """
    return _source(package).digest


def source_place(package: str) -> Place:
    """Return the folder of the source that `source_digest` covers, and a digest of each of its files."""
    return _source(package).place


def _source(package: str) -> _Source:
    modules = [(name, sys.modules[name]) for name in list(sys.modules) if name.partition(".")[0] == package]
    specs = {name: getattr(module, "__spec__", None) or module for name, module in modules}
    known = _sources.get(package)
    # Keep modules that are gone: one that returns was loaded again. A new module was not loaded before.
    if known is None:
        known = _sources[package] = _Source(specs, 0, *_read(package, 0))
    elif any(known.specs.get(name, spec) is not spec for name, spec in specs.items()):
        reloads = known.reloads + 1
        known = _sources[package] = _Source({**known.specs, **specs}, reloads, *_read(package, reloads))
    else:
        known.specs.update(specs)
    return known


def _read(package: str, reloads: int) -> tuple[str, Place]:
    digest, files, home = hashlib.sha256(), {}, ""
    for folder, path in _files(package):
        home = home or folder
        with open(path, "rb") as file:
            text = file.read()
            digest.update(os.path.basename(path).encode() + b"\0" + text)
            files[os.path.relpath(path, folder)] = hashlib.sha256(text).hexdigest()[:16]
            if os.fstat(file.fileno()).st_ctime > LOAD_TIME:
                digest.update(f"{os.getpid()} {LOAD_TIME} {reloads}".encode())
    return digest.hexdigest()[:16] if files else "", Place(home, files)


def _files(package: str) -> Iterator[tuple[str, str]]:
    """Yield a package's folder with each Python file in it; for a single module, its folder and file."""
    module = sys.modules.get(package)
    folders = list(getattr(module, "__path__", ()))
    if module is not None and not folders:
        try:
            path = inspect.getsourcefile(module)
        except TypeError:
            path = None
        if path:
            yield os.path.dirname(path), path
    for folder in folders:
        for at, inner, names in os.walk(folder):
            inner[:] = sorted(name for name in inner if name != "__pycache__")
            for name in sorted(names):
                if name.endswith(".py"):
                    yield folder, os.path.join(at, name)
