"""The folder of the compile cache: entries written at once or not at all, and read only if every byte is as written.

An entry is a folder whose name begins with a digest of its content and ends with a digest of its factors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.compilation.cache.differences import Difference, Factors, Place, Places, differences
from core.compilation.cache.entry import (
    FACTORS,
    GRAPHS,
    READS,
    Damaged,
    all_factors,
    as_json,
    read_factors,
    read_graphs,
    read_reads,
    write_files,
)
from core.compilation.cache.folders import (
    Untrusted,
    default_folder,
    make_private,
    refuse_foreign,
    refuse_unwritable,
    size_of,
    subfolders,
)
from core.compilation.cache.summary import Summary, summarize
from core.compilation.cache.whole import WholeFolders, is_temporary
from core.errors import UsageError
from core.settings import Settings

if TYPE_CHECKING:
    from core.common.kernel_compilers import KernelCompiler

log = logging.getLogger("core.cache")
FORMAT = 2
MOST_COMPARED = 16
"""Entries, the latest ones, that a miss is compared with to explain it."""
_KERNELS = "kernels"
"""Folder for the files of kernel compilers, with one subfolder per compiler."""
_LOWERED = "lowered"
"""The subfolder for the artefacts of lowerings."""
SOURCE = "source"
"""A field in an entry's graphs: the folder of each package that is a factor as a whole. The folder itself is no
factor."""
_STORE = "graphs-"
"""First part of the names of entry folders; one per format version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry on disk."""

    name: str
    path: Path
    num_bytes: int
    #: Seconds since the entry was written.
    age_s: float
    model: str = ""
    device: str = ""
    #: Why the entry can't be used, "" if it can.
    problem: str = ""


class Store:
    """The entries below one folder, and beside them the files of kernel compilers after `keep_kernels`."""

    def __init__(self, folder: Path) -> None:
        self.kernels = folder / _KERNELS
        self.lowered = WholeFolders(self.kernels / _LOWERED, folder)
        self.folder = folder / f"{_STORE}{FORMAT}"
        self._whole = WholeFolders(self.folder, folder)

    @classmethod
    def of_user(cls) -> Store:
        """Return the store that programs use: in `CORE_CACHE_DIR`, else in the user's own cache folder."""
        return cls(Settings.from_environment().cache_dir or default_folder())

    def factors(self, name: str) -> Factors:
        """Return the factors of an entry, and under `values` what its trace read; raise `Damaged` without them."""
        return all_factors(self.folder / name)

    def reads(self, name: str) -> dict[str, Any]:
        """Return what an entry's trace read: `names` and `values`; raise `Damaged` where it does not say."""
        return read_reads(self.folder / name)

    def graphs(self, name: str, factors: Factors) -> dict[str, Any]:
        """Return the graphs of an entry for these factors; raise `Damaged` for one that is not as written."""
        if read_factors(self.folder / name) != json.loads(as_json(factors)):
            raise Damaged("it was made for other factors than its name says")
        return read_graphs(self.folder / name)

    def summary(self, name: str) -> Summary:
        """Return the summary of an entry; raise `Damaged` if it can't be read."""
        return summarize(self.factors(name), read_graphs(self.folder / name))

    def places(self, name: str) -> Places:
        """Return the folders of the source that made an entry; empty if the entry does not say or can't be read."""
        try:
            noted = read_graphs(self.folder / name).get(SOURCE, {})
            return {package: Place(each["folder"], each["files"]) for package, each in noted.items()}
        except (Damaged, AttributeError, KeyError, TypeError):
            return {}

    def candidates(self, key: str, *, most: int) -> list[str]:
        """Return the names of the entries for the factors of this key, the latest first; raise `Untrusted`."""
        paths = [path for path in subfolders(self.folder) if path.name.endswith(f"-{key}")]
        if not paths:
            return []
        self._whole.refuse_foreign()
        paths = [path for path in paths if not is_temporary(path)]
        return [path.name for path in sorted(paths, key=_written, reverse=True)[:most]]

    def write(self, key: str, factors: Factors, reads: Mapping[str, Any], graphs: Mapping[str, Any]) -> Path:
        """Write an entry, whole or not at all, in place of one that is damaged; raise `OSError` where that can't be."""
        self._whole.open()
        made = self._whole.aside()
        try:
            texts = {FACTORS: as_json(factors), READS: as_json(reads), GRAPHS: as_json(graphs)}
            return self._whole.put(made, f"{write_files(made, texts)}-{key}", _checked)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def discard(self, name: str) -> None:
        """Move an unusable entry away, so that another may be written."""
        self._whole.remove(self.folder / name)

    def nearest(self, factors: Factors, *, most: int = MOST_COMPARED) -> tuple[str, list[Difference]] | None:
        """Return the key of the readable entry of the same model and device that differs least, and the differences.

        Of the `most` latest entries, and no others are read: a miss explains itself in the same time whatever the size
        of the cache. None where there is no such entry: that of another device differs in everything.
        """
        best: tuple[int, str, list[Difference]] | None = None
        paths = sorted((self.folder / name for name in self._whole.names()), key=_written, reverse=True)
        for entry in map(self._entry, paths[:most]):
            with suppress(Damaged):
                if entry.problem:
                    continue
                stored = read_factors(entry.path)
                if not {*stored.get("model", {}).values()} & {*factors.get("model", {}).values()}:
                    continue
                if stored.get("device", {}).get("name") != factors.get("device", {}).get("name"):
                    continue
                found = differences(stored, factors)
                if best is None or len(found) < best[0]:
                    best = (len(found), entry.name, found)
        return best[1:] if best is not None else None

    def entries(self) -> list[Entry]:
        """Return all entries, the latest first; damaged ones with what is wrong."""
        paths = [self.folder / name for name in self._whole.names()]
        return sorted(map(self._entry, paths), key=lambda entry: entry.age_s)

    def keep_kernels(self, compilers: Iterable[KernelCompiler]) -> None:
        """Let kernel compilers of this process keep their files here too, unless the environment names another folder.

        These files are executable. If others may write to a folder, or this user can't, its compiler keeps its own
        default folder; the log says so once per reason.
        """
        refused: dict[str, list[str]] = {}
        for compiler in compilers:
            folder, variable = self.kernels / compiler.name, compiler.folder_variable
            if not variable or variable in os.environ:
                continue
            try:
                if reason := compiler.refuses(str(folder)):
                    raise Untrusted(reason)
                for each in (self.kernels.parent, self.kernels, folder):
                    make_private(each)
                    refuse_foreign(each)
                refuse_unwritable(folder)
            except (OSError, Untrusted) as error:
                refused.setdefault(str(error), []).append(compiler.name)
            else:
                os.environ[variable] = str(folder)
        for text, names in refused.items():
            hint = "CORE_CACHE_DIR may name another folder"
            log.warning("compile cache: not used for kernels of %s: %s; %s", ", ".join(names), text, hint)

    def kernel_bytes(self) -> dict[str, int]:
        """Return the bytes that each compiler of kernels keeps here."""
        return {path.name: size_of(path) for path in sorted(subfolders(self.kernels))}

    def clear(self) -> tuple[int, int]:
        """Remove all entries, kernels and half-written folders; return the number of entries, and of bytes.

        A concurrent reader finds an entry whole or not at all. Raises `UsageError` if this user may not remove them.
        """
        count = num_bytes = 0
        base = self.folder.parent
        stores = [path for path in subfolders(base) if path.name.startswith(_STORE)]
        if self.folder.is_symlink():  # which programs follow
            stores.append(self.folder)
        if not stores and not subfolders(self.kernels):
            return 0, 0
        try:
            make_private(self.folder)
            refuse_unwritable(self.folder)
        except OSError as error:
            raise UsageError(
                "clearing the compile cache", found=str(error), remedy="clear it as the user whose it is"
            ) from None
        for path in [*(path for store in stores for path in subfolders(store)), *subfolders(self.kernels)]:
            size = size_of(path)
            if self._whole.remove(path):
                num_bytes += size
                count += path.parent != self.kernels and not is_temporary(path)
        return count, num_bytes

    def _entry(self, path: Path) -> Entry:
        model = device = problem = ""
        age_s = 0.0
        try:
            age_s = max(0.0, time.time() - path.stat().st_mtime)
            factors = _checked(path)
            model = ", ".join(sorted(set(factors["model"].values())))
            device = factors["device"]["name"]
        except (Damaged, Untrusted, OSError, KeyError, AttributeError, TypeError) as error:
            problem = str(error) or type(error).__name__
        num_bytes = size_of(path)
        return Entry(
            name=path.name, path=path, num_bytes=num_bytes, age_s=age_s, model=model, device=device, problem=problem
        )


def key_of(factors: Factors) -> str:
    """Return the digest of a program's factors, the last part of the names of its entries."""
    return hashlib.sha256(as_json(factors).encode()).hexdigest()[:32]


def _checked(path: Path) -> Factors:
    """Return the factors of an entry; raise `Damaged` unless every file is as written."""
    read_graphs(path)
    read_reads(path)
    return read_factors(path)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0
