"""The source of whole packages as a factor of the cache: a digest of it, and what lies where for those who compare."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.compilation.cache.began import BEGAN
from core.compilation.cache.differences import Place


@dataclass(slots=True)
class _Source:
    """What was loaded of a package when its digest was made.

    specs: by module; they are held, since identity tells them apart. reloads: how often a module of it was found to
    have been loaded again.
    """

    specs: dict[str, Any]
    reloads: int
    digest: str
    place: Place


_sources: dict[str, _Source] = {}


def source_digest(package: str) -> str:
    """Return a digest of all Python source of an importable package, as it was loaded; "" where it has none on disk.

    A file that was changed since this process began may not be the code that runs here: then no other process gets the
    same digest, nor this one after a module was loaded again (`importlib.reload`), which gives a module a new spec.
    """
    return _source(package).digest


def source_place(package: str) -> Place:
    """Return where the source lies that `source_digest` is of, and a digest of each of its files."""
    return _source(package).place


def _source(package: str) -> _Source:
    modules = [(name, sys.modules[name]) for name in list(sys.modules) if name.partition(".")[0] == package]
    specs = {name: getattr(module, "__spec__", None) or module for name, module in modules}
    known = _sources.get(package)
    # Those that have left are kept: one that comes back is loaded again. What is new was not loaded before.
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
            if os.fstat(file.fileno()).st_ctime > BEGAN:
                digest.update(f"{os.getpid()} {BEGAN} {reloads}".encode())
    return digest.hexdigest()[:16] if files else "", Place(home, files)


def _files(package: str) -> Iterator[tuple[str, str]]:
    """Yield a package's folder and a file of Python source in it, of a module its own folder and file."""
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
