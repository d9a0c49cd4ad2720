"""The folder of the compile cache: entries written at once or not at all, and read only if every byte is as written.

An entry is a folder named after the digest of its factors: `factors.json`, `graphs.json` and `checksums.json`. No lock
is taken: a writer makes the folder under another name and renames it; of two writers one is first, and both go on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.compilation.cache.differences import Difference, Factors, Place, Places, differences
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
from core.settings import Settings

if TYPE_CHECKING:
    from core.common.kernel_compilers import KernelCompiler

log = logging.getLogger("core.cache")
FORMAT = 1
_FACTORS, _GRAPHS, _CHECKSUMS = "factors.json", "graphs.json", "checksums.json"
_KERNELS = "kernels"
"""Folder of what compilers of kernels keep, each in a folder of its name."""
SOURCE = "source"
"""In the graphs of an entry: where the source of each package lay that counts as a whole. No factor."""
_TEMPORARY = ".writing-"
_STALE_S = 3600.0


class Damaged(Exception):
    """An entry that is not what was written; the text says how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry as it lies there. problem: why it can't be used, "" if it can. age_s: since it was written."""

    key: str
    path: Path
    num_bytes: int
    age_s: float
    model: str = ""
    device: str = ""
    problem: str = ""


class Store:
    """The entries below one folder, and beside them what compilers of kernels keep where `keep_kernels` was asked."""

    def __init__(self, folder: Path) -> None:
        self.kernels = folder / _KERNELS
        self.folder = folder / f"graphs-{FORMAT}"

    @classmethod
    def of_user(cls) -> Store:
        """Return the store that programs use: in `CORE_CACHE_DIR`, else in the user's own cache folder."""
        return cls(Settings.from_environment().cache_dir or default_folder())

    def factors(self, key: str) -> Factors:
        """Return the factors of an entry; raise `Damaged` where they can't be read."""
        return self._load_one(self.folder / key, _FACTORS)

    def summary(self, key: str) -> Summary:
        """Return what an entry was made for, in short; raise `Damaged` where it can't be read."""
        return summarize(*self._load(self.folder / key))

    def places(self, key: str) -> Places:
        """Return where the source lay that made an entry; nothing where the entry does not say, or can't be read."""
        try:
            noted = self._load_one(self.folder / key, _GRAPHS).get(SOURCE, {})
            return {package: Place(each["folder"], each["files"]) for package, each in noted.items()}
        except (Damaged, AttributeError, KeyError, TypeError):
            return {}

    def read(self, key: str, factors: Factors) -> dict[str, Any] | None:
        """Return the graphs of an entry; None where there is none. Raises `Damaged` for one that is not as written."""
        path = self.folder / key
        if not path.is_dir():
            return None
        refuse_foreign(self.folder)
        stored, graphs = self._load(path)
        if stored != json.loads(_text(factors)):
            raise Damaged("it was made for other factors than its name says")
        return graphs

    def write(self, key: str, factors: Factors, graphs: Mapping[str, Any]) -> Path:
        """Write an entry, whole or not at all, in place of one that is damaged; raise `OSError` where that can't be."""
        make_private(self.folder.parent)
        make_private(self.folder)
        refuse_foreign(self.folder)
        self._remove_stale()
        made = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{key[:8]}-", dir=self.folder))
        try:
            texts = {_FACTORS: _text(factors), _GRAPHS: _text(graphs)}
            sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
            for name, text in (*texts.items(), (_CHECKSUMS, _text(sums))):
                with open(made / name, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            return self._put(made, self.folder / key)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _put(self, made: Path, path: Path) -> Path:
        for _ in range(3):
            try:
                os.rename(made, path)
                return path
            except OSError:
                if not path.exists():
                    raise
            # Somebody else's of the same factors is as good, unless it is damaged.
            try:
                self._load(path)
                return path
            except Damaged:
                aside = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.folder))
                with suppress(OSError):
                    os.rename(path, aside / "damaged")
                shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"{path} can't be replaced")

    def discard(self, key: str) -> None:
        """Put an entry that can't be used out of the way, so that another may be written."""
        with suppress(OSError):
            aside = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.folder))
            with suppress(OSError):
                os.rename(self.folder / key, aside / "discarded")
            shutil.rmtree(aside, ignore_errors=True)

    def nearest(self, factors: Factors, *, most: int = 16) -> tuple[str, list[Difference]] | None:
        """Return the key of the readable entry of the same model that differs least, with the differences; or None."""
        best: tuple[int, str, list[Difference]] | None = None
        for entry in self.entries()[:most]:
            with suppress(Damaged):
                if entry.problem:
                    continue
                stored = self._load_one(entry.path, _FACTORS)
                if not {*stored.get("model", {}).values()} & {*factors.get("model", {}).values()}:
                    continue
                found = differences(stored, factors)
                if best is None or len(found) < best[0]:
                    best = (len(found), entry.key, found)
        return best[1:] if best is not None else None

    def entries(self) -> list[Entry]:
        """Return all entries, the latest first; damaged ones with what is wrong."""
        paths = [path for path in subfolders(self.folder) if not path.name.startswith(_TEMPORARY)]
        return sorted(map(self._entry, paths), key=lambda entry: entry.age_s)

    def keep_kernels(self, compilers: Iterable[KernelCompiler]) -> None:
        """Have compilers of kernels keep theirs here too in this process, where the environment names no other place.

        What lies there is run: where others may write to a folder, or this user can't, its compiler keeps to its own,
        and the log says so in one line per reason.
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
        """Remove all entries, kernels, and whatever was left half-written; return how many entries, and bytes."""
        count = num_bytes = 0
        for path in [*subfolders(self.folder), *subfolders(self.kernels)]:
            num_bytes += size_of(path)
            count += path.parent == self.folder and not path.name.startswith(_TEMPORARY)
            shutil.rmtree(path)
        return count, num_bytes

    def _entry(self, path: Path) -> Entry:
        model = device = problem = ""
        age_s = 0.0
        try:
            age_s = max(0.0, time.time() - path.stat().st_mtime)
            factors, _ = self._load(path)
            model = ", ".join(sorted(set(factors["model"].values())))
            device = factors["device"]["name"]
        except (Damaged, OSError, KeyError, AttributeError) as error:
            problem = str(error) or type(error).__name__
        return Entry(
            key=path.name,
            path=path,
            num_bytes=size_of(path),
            age_s=age_s,
            model=model,
            device=device,
            problem=problem,
        )

    def _load(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._load_one(path, _FACTORS), self._load_one(path, _GRAPHS)

    def _load_one(self, path: Path, name: str) -> dict[str, Any]:
        try:
            sums = json.loads((path / _CHECKSUMS).read_bytes())
            data = (path / name).read_bytes()
            wanted = sums[name]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{name} or its checksum can't be read ({type(error).__name__}: {error})") from None
        if hashlib.sha256(data).hexdigest() != wanted:
            raise Damaged(f"{name} is not what was written: its checksum differs")
        try:
            found = json.loads(data)
        except ValueError as error:
            raise Damaged(f"{name} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise Damaged(f"{name} holds a {type(found).__name__}")
        return found

    def _remove_stale(self) -> None:
        """Remove what a writer left that did not live to rename it."""
        for path in subfolders(self.folder):
            with suppress(OSError):
                if path.name.startswith(_TEMPORARY) and time.time() - path.stat().st_mtime > _STALE_S:
                    shutil.rmtree(path, ignore_errors=True)


def key_of(factors: Factors) -> str:
    """Return the name of the entry for these factors."""
    return hashlib.sha256(_text(factors).encode()).hexdigest()[:32]


def _text(value: Any) -> str:
    return _json(value, 0) + "\n"


def _json(value: Any, depth: int) -> str:
    """Return JSON with one line for what is small: a node, a factor."""
    if not isinstance(value, (Mapping, list)) or not value or depth == 5:
        return json.dumps(value, sort_keys=depth < 2, allow_nan=False)
    end, step = "\n" + " " * depth, "\n" + " " * (depth + 1)
    if isinstance(value, list):
        return "[" + ",".join(step + _json(item, depth + 1) for item in value) + end + "]"
    items = sorted(value.items()) if depth < 2 else value.items()
    return "{" + ",".join(f"{step}{json.dumps(name)}: {_json(item, depth + 1)}" for name, item in items) + end + "}"
