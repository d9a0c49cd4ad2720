"""Artefacts: files that lowerings keep of compiled graphs, found again for an equal graph with equal examples.

An artefact is executable code. So it is read only from folders that nobody else may write to, and only if every byte is
as written (as store.py does for entries). Its name is a digest of all that its files depend on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from core.common.graphs.weak import overlaps
from core.common.lowering import UNKEPT, Unavailable, in_one_step
from core.common.under_way import Steps, finish
from core.compilation.cache.differences import Factors
from core.compilation.cache.entry import Damaged, Gone, as_json
from core.compilation.cache.factors import is_foreign_path
from core.compilation.cache.folders import Untrusted, refuse_foreign
from core.compilation.cache.graphs import encode_attributes_whole, encode_node
from core.compilation.cache.literals import Targets, encode
from core.compilation.cache.uncacheable import Uncacheable
from core.compilation.cache.whole import WholeFolders

log = logging.getLogger("core.cache")
_Loaded = TypeVar("_Loaded")
_FORMAT = 1
_CHECKSUMS, _FACTORS = "checksums.json", "factors.json"
_GROUPS = ("versions", "source", "device", "torch", "implementations")
"""The program's factors on which code compiled from a finished graph depends."""
_OF_TORCH = frozenset({"aten", "prims", "prim", "quantized", "mkldnn", "onednn", "mkl", "c10d", "_c10d_functional"})
_OF_CORE = "core"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphArtifacts:
    """The `Artifacts` of one graph. packages: those whose source is among the factors.

    under_way: names of the artefacts that the program is making, shared by its graphs.
    """

    folders: WholeFolders
    graph: fx.GraphModule
    values: tuple[Any, ...]
    targets: Targets
    packages: frozenset[str]
    factors: Factors
    under_way: set[str]

    def use(self, factors: Mapping[str, str], make: Callable[[Path], None], load: Callable[[Path], _Loaded]) -> _Loaded:
        """Return what `load` makes of the files for these factors, made by `make` if there are none that it can load.

        Raises `Unavailable` as `load` does: the files stay.
        Where they can't be kept, the log says why, and they are made for this time only.
        """
        return finish(self.begin(factors, in_one_step(make), load))

    def begin(
        self, factors: Mapping[str, str], make: Callable[[Path], Steps[None]], load: Callable[[Path], _Loaded]
    ) -> Steps[_Loaded]:
        """Do the same in the steps of `make`; where the program is making an equal graph, wait for that one."""
        try:
            text = as_json({"lowering": dict(factors), **self._identity()})
            name = hashlib.sha256(text.encode()).hexdigest()[:32]
            if name in self.under_way:
                yield lambda: name not in self.under_way
            found = _find(self.folders, name, load)
            if found is not None:
                return found[0]
            self.folders.open()
            made = self.folders.aside()
        except Unavailable:
            raise
        except (OSError, Untrusted, Uncacheable) as reason:
            log.warning("compile cache: not used for what is compiled of a graph: %s", reason)
            return (yield from UNKEPT.begin(factors, make, load))
        self.under_way.add(name)
        try:
            yield from make(made)
            loaded = load(made)
            self._keep(made, name, text)
            return loaded
        finally:
            self.under_way.discard(name)
            shutil.rmtree(made, ignore_errors=True)

    def _keep(self, made: Path, name: str, text: str) -> None:
        """Put a folder of files where it is found under its name; log the reason if that fails."""
        try:
            (made / _FACTORS).write_text(text, encoding="utf-8")
            _seal(made)
            log.debug("compile cache: wrote %s", self.folders.put(made, name, check))
        except (OSError, Untrusted) as reason:  # the artefact is loaded; failing to keep it must not lose it
            log.warning("compile cache: what was compiled of a graph can't be kept: %s", reason)

    def _identity(self) -> dict[str, Any]:
        """Return a text that is equal for graphs that compute the same from inputs with the same metadata."""
        nodes = list(self.graph.graph.nodes)
        for node in nodes:
            _refuse_unknown_code(node.target, self.packages)
        texts = [encode_node(node, self.targets) for node in nodes]
        return {
            "format": _FORMAT,
            "factors": {name: self.factors[name] for name in _GROUPS},
            "nodes": [{key: value for key, value in text.items() if key != "module"} for text in texts],
            "attributes": encode_attributes_whole(self.graph),
            "values": [_describe(value) for value in self.values],
            "overlaps": [list(each) for each in overlaps(self.values)],
        }


def _find(folders: WholeFolders, name: str, load: Callable[[Path], _Loaded]) -> tuple[_Loaded] | None:
    """Return what `load` makes of an artefact, None where there is none; raise `Untrusted` where others may write."""
    path = folders.folder / name
    if not path.is_dir():
        return None
    folders.refuse_foreign()
    try:
        check(path)
        loaded = (load(path),)
    except (Untrusted, Gone):
        if path.exists():
            raise
        return None
    except Unavailable:
        raise
    except Exception as error:  # whatever is wrong with an artefact, it can be made again
        reason = str(error) if isinstance(error, Damaged) else f"it can't be loaded: {type(error).__name__}: {error}"
        log.warning("compile cache: artefact %s is not used and made anew: %s", name[:12], reason)
        folders.remove(path)
        return None
    log.debug("compile cache: loaded %s from %s", name[:12], folders.folder)
    return loaded


def _seal(folder: Path) -> None:
    """Write the checksums of the files in a folder, and leave them to their user alone."""
    sums = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    (folder / _CHECKSUMS).write_text(as_json(sums), encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o600)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check(folder: Path) -> None:
    """Raise `Damaged` for an artefact that is not as written, and `Untrusted` for one that others may write to."""
    try:
        for each in (folder, *folder.iterdir()):
            refuse_foreign(each)
        sums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        if not isinstance(sums, dict) or {*sums, _CHECKSUMS} != {path.name for path in folder.iterdir()}:
            raise Damaged("its files are not those that were written")
        wrong = [name for name, digest in sums.items() if _digest(folder / name) != digest]
    except (OSError, ValueError) as error:
        if not folder.exists():
            raise Gone("it was removed meanwhile") from None
        raise Damaged(f"its checksums can't be read ({type(error).__name__}: {error})") from None
    if wrong:
        raise Damaged(f"{wrong[0]} is not what was written: its checksum differs")
    # The name is a digest of its factors and is independent of the cache's folder.
    if hashlib.sha256((folder / _FACTORS).read_bytes()).hexdigest()[:32] != folder.name:
        raise Damaged("it was made for other factors than its name says")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_unknown_code(target: Any, packages: frozenset[str]) -> None:
    """Refuse an op that the compiler may decompose by code that is not among the factors."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        for name in target.overloads():
            _refuse_unknown_code(getattr(target, name), packages)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in {*_OF_TORCH, _OF_CORE}:
        return
    name = str(target._schema.name)
    fake = torch._library.simple_registry.singleton.find(name).fake_impl
    composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    kernel = fake.kernel
    if composite or kernel is None or is_foreign_path(kernel.source.rpartition(":")[0], packages):
        raise Uncacheable(f"the graph calls {name}, whose fake kernel is neither torch's nor the device's plugin's")


def _describe(value: Any) -> Any:
    """Return, as text, what a compiler may use of a placeholder's value; raise `Uncacheable` if there is no such
    text."""
    if not isinstance(value, Tensor):
        return [type(value).__name__, encode(value)]
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        raise Uncacheable(f"the graph takes a {type(value).__qualname__} of layout {value.layout}")
    dtype, place, bits = str(value.dtype), str(value.device), f"{value.is_conj()} {value.is_neg()}"
    return ["Tensor", dtype, place, list(value.shape), list(value.stride()), bits]
