"""Hides damaged distributions from the rest of the process: torch and transformers read the metadata of all.

`importlib.metadata.entry_points()` raises where one installed distribution has a malformed file, and `import torch`
asks it for backends. So what `core` has found damaged is left out of what this process, and the workers that it starts,
find installed. Where nothing is damaged, nothing is changed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from typing import Any

from core.host.distributions.metadata import Damaged, damaged_record, folder_of, identity, installed

logger = logging.getLogger(__name__)

_set_aside: frozenset[str] = frozenset()
_told: tuple[Damaged, ...] = ()
_announced: set[Damaged] = set()


class _Sound:
    """A finder of `sys.meta_path` that finds all modules and the distributions that are not set aside."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def find_distributions(self, *arguments: Any, **keywords: Any) -> Iterator[Distribution]:
        found = self.whole.find_distributions(*arguments, **keywords)
        return (each for each in found if folder_of(each) not in _set_aside)


def isolate(damaged: Iterable[Damaged], unread: Iterable[Damaged] = ()) -> None:
    """Set exactly the damaged distributions aside; log each of `unread` once per process.

    Lists of files (RECORD) of distributions without a plugin are looked at here: transformers reads them all.
    """
    global _told
    folders = {each.folder for each in damaged}
    lists = _damaged_lists(folders)
    _told = (*unread, *lists)
    for each in _told:
        if each not in _announced:
            _announced.add(each)
            logger.warning("%s", each)
    set_aside(folders | {each.folder for each in lists})


def set_aside(folders: Iterable[str]) -> None:
    """Hide the distributions with metadata in these folders from this process."""
    global _set_aside
    _set_aside = frozenset(folders)
    sys.meta_path[:] = [_wrapped(finder) if _set_aside else _whole(finder) for finder in sys.meta_path]


def warnings() -> list[str]:
    """Return one line for each distribution that was found damaged by the last `isolate`, plugins that say so apart."""
    return [str(each) for each in _told]


def folders_set_aside() -> tuple[str, ...]:
    """Return the folders that are set aside now, in order, for a process that is to set them aside too."""
    return tuple(sorted(_set_aside))


def _wrapped(finder: Any) -> Any:
    whole = isinstance(finder, _Sound) or not hasattr(finder, "find_distributions")
    return finder if whole else _Sound(finder)


def _whole(finder: Any) -> Any:
    return finder.whole if isinstance(finder, _Sound) else finder


def _damaged_lists(known: set[str]) -> list[Damaged]:
    found: list[Damaged] = []
    for distribution in installed()[0]:
        folder = folder_of(distribution)
        problem = "" if folder in known else damaged_record(distribution)
        if problem:
            name, version, _ = identity(distribution)
            found.append(Damaged(distribution=f"{name} {version}", folder=folder, problem=problem))
    return found
