"""Folders that are written at once or not at all.

There is no lock: a writer makes the folder under another name and renames it, and a remover renames a folder first. Of
two concurrent writers one wins, and both continue.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from core.compilation.cache.entry import Damaged
from core.compilation.cache.folders import make_private, refuse_foreign, subfolders

_TEMPORARY = ".writing-"
_STALE_S = 3600.0


class WholeFolders:
    """The folders inside one folder, which lies below the base folder of the cache."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder = folder
        self._levels = [*reversed([each for each in folder.parents if each.is_relative_to(base)]), folder]

    def open(self) -> None:
        """Make the folder where there is none, for its user alone; raise `OSError` or `Untrusted`."""
        for each in self._levels:
            make_private(each)
        self.refuse_foreign()
        self._remove_stale()

    def refuse_foreign(self) -> None:
        """Raise `Untrusted` where others may write to the folder or to those above it, up to the base."""
        for each in self._levels:
            refuse_foreign(each)

    def aside(self) -> Path:
        """Return a new folder that no reader takes for a whole one."""
        return Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.folder))

    def names(self) -> list[str]:
        """Return the names of the whole folders."""
        return [path.name for path in subfolders(self.folder) if not is_temporary(path)]

    def put(self, made: Path, name: str, check: Callable[[Path], object]) -> Path:
        """Rename a folder made by `aside` to its final name, unless an undamaged one (by `check`) already has that
        name."""
        path = self.folder / name
        for _ in range(3):
            try:
                os.rename(made, path)
                return path
            except OSError:
                if not path.exists():
                    raise
            # Another process's folder for the same content is as good, unless it is damaged.
            try:
                check(path)
                return path
            except Damaged:
                self.remove(path)
        raise OSError(f"{path} can't be replaced")

    def remove(self, path: Path) -> bool:
        """Remove a folder atomically for readers; return whether it existed."""
        try:
            aside = self.aside()
        except OSError:
            return False
        try:
            os.rename(path, aside / "removed")
            return True
        except OSError:
            return False
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _remove_stale(self) -> None:
        """Remove the folders of writers that died before renaming them."""
        for path in filter(is_temporary, subfolders(self.folder)):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    shutil.rmtree(path, ignore_errors=True)


def is_temporary(path: Path) -> bool:
    """Tell whether a folder was left half-written, or half-removed."""
    return path.name.startswith(_TEMPORARY)
