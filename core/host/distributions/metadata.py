"""Reads the metadata of installed distributions one by one, so that a damaged one does not affect the others."""

from __future__ import annotations

import csv
import functools
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, DistributionFinder, EntryPoint

_ENTRY_POINTS = "entry_points.txt"
_RECORD = "RECORD"
_MAX_BYTES = {_ENTRY_POINTS: 2**20}
_MAX_METADATA_BYTES = 2**24

# A name as the core metadata specification defines it; a version must only be one printable word.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9.!+_-]{1,100}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damaged:
    """An installed distribution whose metadata can't be read; `str` gives the one line that a user is told."""

    #: Name and version, or as much of them as the folder's name holds.
    distribution: str
    #: The folder of its metadata.
    folder: str
    #: What is wrong with which file.
    problem: str

    def __str__(self) -> str:
        where = self.folder if self.folder.isprintable() else ascii(self.folder)
        return (
            f"distribution {self.distribution} ({where}) is damaged and left out: {self.problem}; "
            "install it again, or uninstall it (where pip can't, delete that folder)"
        )


class _Wrong(Exception):
    """Says what is wrong with the text of a file."""


def installed() -> tuple[list[Distribution], list[str]]:
    """Return all installed distributions, also those set aside, and a line for each finder that fails to list its own.

    A distribution is listed by its folder's name alone; nothing of it is read yet.
    """
    found: list[Distribution] = []
    failures: list[str] = []
    for finder in sys.meta_path:
        find = getattr(getattr(finder, "whole", finder), "find_distributions", None)
        if find is None:
            continue
        try:
            found += find(DistributionFinder.Context())
        except Exception as error:
            failures.append(f"finder {finder!r} can't list its distributions: {type(error).__name__}: {error}")
    # A folder that stands on sys.path twice is listed twice.
    return list({folder_of(each) or id(each): each for each in found}.values()), failures


def folder_of(distribution: Distribution) -> str:
    """Return the folder of its metadata, "" for one that a foreign finder keeps elsewhere."""
    return str(getattr(distribution, "_path", ""))


def identity(distribution: Distribution) -> tuple[str, str, str]:
    """Return name, version and a defect; the folder's name tells them where METADATA is missing or damaged."""
    folder = os.path.basename(folder_of(distribution)) or "unknown"
    problem = undecodable(distribution)
    if not problem:
        fields = distribution.metadata
        name, version = fields["Name"] or "", fields["Version"] or ""
        if _NAME.fullmatch(name) and _VERSION.fullmatch(version):
            return name, version, ""
    name, _, version = folder.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")
    name, version = (text if text.isprintable() else ascii(text) for text in (name, version or "(no version)"))
    cause = f": {problem}" if problem else ""
    return name, version, f"its metadata ({folder}/METADATA) is missing or damaged{cause}"


def entry_points(distribution: Distribution) -> tuple[list[EntryPoint], str]:
    """Return all entry points, or none and what is wrong with their file."""
    problem = _problem(distribution, _ENTRY_POINTS, _parsed_entry_points)
    return ([], problem) if problem else (list(distribution.entry_points), "")


def undecodable(distribution: Distribution) -> str:
    """Return why METADATA can't be read, or ""; a missing file is no defect here."""
    # An old `.egg-info` may be a file itself.
    files = ("",) if os.path.isfile(folder_of(distribution)) else ("METADATA", "PKG-INFO")
    return next(filter(None, (_problem(distribution, file, _decoded) for file in files)), "")


def damaged_record(distribution: Distribution) -> str:
    """Return what is wrong with RECORD, the list of its files; "" for a good one and where there is none.

    One that was read is not read again: RECORD is long, and written by installations only.
    """
    folder = folder_of(distribution)
    try:
        changed = os.stat(os.path.join(folder, _RECORD)).st_mtime_ns
    except (OSError, ValueError):
        changed = 0
    return _record_problem(_ByFolder(folder, distribution), changed)


class _ByFolder:
    """A distribution that counts as equal to any other of that folder."""

    def __init__(self, folder: str, distribution: Distribution) -> None:
        self.folder, self.distribution = folder, distribution

    def __hash__(self) -> int:
        return hash(self.folder)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByFolder) and self.folder == other.folder != ""


@functools.lru_cache(maxsize=4096)
def _record_problem(where: _ByFolder, changed: int) -> str:
    return _problem(where.distribution, _RECORD, _parsed_record)


def _problem(distribution: Distribution, file: str, check: Callable[[Distribution, str], None]) -> str:
    """Return what is wrong with a file of the metadata, as "RECORD is no file"; "" where it is good or absent."""
    folder = folder_of(distribution)
    try:
        odd = _oddity(os.path.join(folder, file), _MAX_BYTES.get(file, _MAX_METADATA_BYTES))
        if not odd:
            check(distribution, file)
    except UnicodeDecodeError as error:
        odd = f"is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start})"
    except _Wrong as error:
        odd = f"is damaged: {error}"
    except Exception as error:
        odd = f"can't be read: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
    return f"{file or 'its text'} {odd}" if odd else ""


def _oddity(path: str, max_bytes: int) -> str:
    """Return why a file can't be read: importlib.metadata would treat it as missing, or block on it."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return "is a link to nothing" if os.path.islink(path) else ""
    except NotADirectoryError:  # the metadata of an old distribution may be one file, or lie in an archive
        return ""
    if stat.S_ISDIR(found.st_mode):
        return "is a folder"
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    if found.st_size > max_bytes:
        return f"has {found.st_size} bytes (at most {max_bytes} are read)"
    return "" if os.access(path, os.R_OK) else "may not be read by this user"


def _decoded(distribution: Distribution, file: str) -> None:
    distribution.read_text(file)


def _parsed_entry_points(distribution: Distribution, file: str) -> None:
    text = distribution.read_text(file) or ""
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if stripped.startswith("[") and stripped.endswith("]"):
            section = stripped
        elif not section:
            raise _Wrong(f"line {number}, {stripped[:80]!r}, stands before the first [group]")
        elif "=" not in stripped:
            raise _Wrong(f"line {number} is {stripped[:80]!r}, which is no `name = module:attribute`")
    # Whatever else the library objects to.
    list(distribution.entry_points)


def _parsed_record(distribution: Distribution, file: str) -> None:
    for number, row in enumerate(csv.reader((distribution.read_text(file) or "").splitlines()), start=1):
        if not row:
            raise _Wrong(f"line {number} is empty")
        if len(row) > 3 or not row[0]:
            raise _Wrong(f"line {number} is no `path,hash,size`: {','.join(row)[:80]!r}")
        if len(row) == 3 and row[2] and not row[2].isdecimal():
            raise _Wrong(f"line {number} gives {row[2][:80]!r} as a size")
        if "\0" in row[0]:
            raise _Wrong(f"line {number} names a path with a zero byte")


def entries_of(points: list[EntryPoint], group: str) -> Iterator[EntryPoint]:
    """Return the entry points of a group, each name and value once."""
    yield from {(point.name, point.value): point for point in points if point.group == group}.values()
