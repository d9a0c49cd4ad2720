"""Paths that a user names: `~` resolved, and refused where the system can't look them up."""

from __future__ import annotations

import os
from pathlib import Path

from core.errors import UsageError

_MAX_NAME_BYTES = 255
"""Of one name between slashes, on every file system that torch runs on."""


def local_path(asked: str, given: str | Path) -> Path:
    """Return the path that a user names, which need not exist, with `~` and `~user` resolved.

    asked: the first line of the error. Raises `UsageError` for an unknown user, for what is too long, and for what may
    not be looked at.
    """
    try:
        path = Path(given).expanduser()
    except RuntimeError:
        user = Path(given).parts[0]
        raise UsageError(
            asked, found=f"there is no home folder for {user!r}", remedy="write the folder out, or ./~ for a name"
        ) from None
    problem = _problem(path)
    if problem:
        raise UsageError(asked, found=problem, remedy="name a path that exists and may be read")
    return path


def _problem(path: Path) -> str:
    """Return why the system can't look a path up, "" where it can or where there is nothing of that name."""
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > _MAX_NAME_BYTES:
        return f"a name in it has {longest} bytes; {_MAX_NAME_BYTES} are the most"
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"it can't be looked up: {error.strerror}"
    except ValueError as error:  # a NUL in it
        return f"it is no path: {error}"
    return ""
