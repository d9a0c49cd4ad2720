"""The user's folder for caches: its path, who may write there, and its size."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


class Untrusted(Exception):
    """A folder that must not be used: somebody else may have written its files, or its name is unsuitable."""


def default_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return where a user's caches lie by the custom of the system: XDG on Linux."""
    values = os.environ if environ is None else environ
    home = Path(values.get("HOME") or os.path.expanduser("~"))
    shared = Path(values.get("XDG_CACHE_HOME", ""))  # the XDG specification ignores a relative path
    if not home.is_absolute():  # the system does not know the user: no folder rather than a relative one
        return Path(tempfile.gettempdir()) / f"core-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    if sys.platform == "win32":
        base = Path(values.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = shared if shared.is_absolute() else home / ".cache"
    return base / "core"


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, links left out; none where it can't be read."""
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def make_private(folder: Path) -> None:
    """Make a folder for its user alone unless it exists; missing parents get the user's default permissions."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True, mode=0o700)


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that others may write: an entry says which functions are called."""
    if not hasattr(os, "getuid"):
        return
    status = folder.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"others may write to {folder}; make it the user's own, with mode 0700")


def refuse_unwritable(folder: Path) -> None:
    """Raise `PermissionError` for a folder in which this user can make no file."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def size_of(path: Path) -> int:
    """Return the bytes of the files below a folder."""
    total = 0
    for at, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(at, name)).st_size
    return total
