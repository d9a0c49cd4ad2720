"""The compile cache of one program: the graphs that its entry gives, and the entry that a compile leaves."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from core.compilation.cache import graphs
from core.compilation.cache.code import is_foreign_code
from core.compilation.cache.differences import Places, each_line, explain
from core.compilation.cache.digests import changed_contents, encode_contents
from core.compilation.cache.folders import Untrusted
from core.compilation.cache.inventory import Inventory
from core.compilation.cache.literals import Targets
from core.compilation.cache.program_factors import compiler_packages, factors_of, plugin_packages, runtime_packages
from core.compilation.cache.reports import decode_report, encode_report
from core.compilation.cache.source import source_place
from core.compilation.cache.store import SOURCE, Damaged, Store, key_of
from core.compilation.cache.uncacheable import Uncacheable
from core.compilation.report import CacheReport, TraceReport
from core.compilation.trace.traced import TracedGraph

if TYPE_CHECKING:
    from core.common.passes.declaration import Pass
    from core.compilation.request import CompileRequest
    from core.device import Mode

log = logging.getLogger("core.cache")
_MOST_IN_REASON, _MOST_LINES = 3, 24


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedGraph:
    """A graph as a phase runs it, with its account. breaks: at how many places a piecewise mode cuts it.

    contents: tensors of which a pass may have read the content.
    """

    traced: TracedGraph
    report: TraceReport
    breaks: int
    contents: tuple[Tensor, ...] = ()


class ProgramCache:
    """The entry of one program. Tells what it did by `report`; nothing that fails here fails the compile."""

    def __init__(self, request: CompileRequest, passes: Sequence[Pass]) -> None:
        """Read the factors off the program and look for its entry. passes: those that may run, in order."""
        self._table = request.table
        self._packages = plugin_packages(request.device)
        self._whole = self._packages | runtime_packages(request.device) | compiler_packages(request.device)
        self._targets = Targets(request.device.ops, self._packages)
        self._store = Store.of_user()
        self._made: dict[tuple[str, str], list[CachedGraph]] = {}
        self._found: dict[tuple[str, str], list[CachedGraph]] = {}
        self.report = CacheReport(state="miss", folder=str(self._store.folder))
        try:
            self._inventory = Inventory(request.models, whole=self._whole)
            self._factors = factors_of(request, passes, self._inventory, self._packages)
        except Exception as error:  # what a model holds may fail in any way when it is looked at
            self._refuse(f"the model can't be read: {type(error).__name__}: {error}")
            return
        self.report = replace(self.report, key=key_of(self._factors))
        if self._inventory.refusals:
            self._refuse("; ".join(each_line(self._inventory.refusals, most=3)))
        else:
            self._look()

    def load(self, phase: str, mode: Mode) -> list[CachedGraph] | None:
        """Return the graphs of a phase in a mode; None where the entry has none."""
        return self._found.get((phase, mode))

    def keep(self, phase: str, mode: Mode, made: Sequence[CachedGraph]) -> None:
        """Note the graphs of a phase that were made now, for `save`."""
        self._made[phase, mode] = list(made)

    def save(self) -> None:
        """Write the entry, if anything was made; say why where it can't be."""
        if not self._made or self.report.state in ("refused", "off"):
            return
        try:
            text = self._encode()
            path = self._store.write(self.report.key, self._factors, text)
        except Uncacheable as reason:
            self._refuse(str(reason))
        except Exception as error:  # the program is made: what can't be kept of it is no reason to lose it
            self._refuse(f"the entry can't be written: {type(error).__name__}: {error}")
        else:
            log.info("compile cache: wrote %s", path)

    def _refuse(self, reason: str) -> None:
        log.warning("compile cache: not used for this program: %s", reason)
        self.report = replace(self.report, state="refused", reason=reason)

    def _look(self) -> None:
        try:
            text = self._store.read(self.report.key, self._factors)
            if text is None:
                self._explain_miss()
                return
            self._found = self._decode(text)
        except Untrusted as refusal:
            self._refuse(str(refusal))
            return
        except Exception as error:  # whatever an entry holds, the way without it is open
            wrong = isinstance(error, (Damaged, Uncacheable))
            reason = str(error) if wrong else f"it can't be read: {type(error).__name__}: {error}"
            log.warning("compile cache: entry %s is not used and made anew: %s", self.report.key[:12], reason)
            self._found = {}
            self._store.discard(self.report.key)
            self.report = replace(self.report, reason=reason)
            return
        num_graphs = sum(map(len, self._found.values()))
        log.info("compile cache: hit %s, %d graphs from %s", self.report.key[:12], num_graphs, self._store.folder)
        self.report = replace(self.report, state="hit")

    def _explain_miss(self) -> None:
        nearest = self._store.nearest(self._factors)
        if nearest is None:
            log.info("compile cache: miss, there is no entry of this model yet")
            self.report = replace(self.report, reason="no entry of this model yet")
            return
        key, found = nearest
        told = partial(explain, found, self._store.places(key), self._places())
        log.info("compile cache: miss; nearest is %s, %d factors differ:", key[:12], len(found))
        for line in told():
            log.info("compile cache:   %s", line)
        reason = f"{len(found)} factors differ from {key[:12]}: {'; '.join(told(most=_MOST_IN_REASON))}"
        lines = tuple(each_line([str(each) for each in found], most=_MOST_LINES))
        self.report = replace(self.report, reason=reason, differences=lines)

    def _places(self) -> Places:
        return {package: source_place(package) for package in self._factors["source"]}

    def _encode(self) -> dict[str, Any]:
        phases = []
        for (phase, mode), made in {**self._found, **self._made}.items():
            texts = [self._encode_one(each) for each in made]
            phases.append({"phase": phase, "mode": mode, "graphs": texts})
        return {"phases": phases, SOURCE: {package: asdict(place) for package, place in self._places().items()}}

    def _encode_one(self, made: CachedGraph) -> dict[str, Any]:
        failed = [each.name for each in made.report.passes if each.error]
        if failed:
            raise Uncacheable(f"passes were undone: {', '.join(failed)}")
        for code in made.traced.code:
            if not self._inventory.covers(code) and is_foreign_code(code, self._whole):
                where = f"{code.co_filename}:{code.co_firstlineno}"
                raise Uncacheable(f"the trace ran through {code.co_qualname} ({where}), to which no factor leads")
        imported = sorted(self._inventory.unloaded & sys.modules.keys())
        if imported:
            raise Uncacheable(f"the model imports {', '.join(imported)} when it runs; import it with the model")
        text = graphs.encode_graph(made.traced, self._targets, self._inventory.path_of)
        # Through JSON, as a later process reads it.
        again = graphs.decode_graph(json.loads(json.dumps(text)), self._targets, self._inventory.tensors)
        if _without_places(graphs.encode_graph(again, self._targets, self._inventory.path_of)) != _without_places(text):
            raise Uncacheable(f"the graph of {made.report.phase} does not read back as itself")
        contents = encode_contents(made.contents, self._inventory.path_of)
        return {
            "breaks": made.breaks,
            "report": encode_report(made.report),
            "contents": contents,
            "graph": text,
        }

    def _decode(self, text: Mapping[str, Any]) -> dict[tuple[str, str], list[CachedGraph]]:
        tensors, known = self._inventory.tensors, [key for keys in self._table.phases.values() for key in keys]
        found: dict[tuple[str, str], list[CachedGraph]] = {}
        for each in text["phases"]:
            made = found[each["phase"], each["mode"]] = []
            for one in each["graphs"]:
                changed = changed_contents(one["contents"], tensors)
                if changed:
                    raise Uncacheable(f"a pass read the content of {', '.join(changed)}, which has changed")
                traced = graphs.decode_graph(one["graph"], self._targets, tensors)
                report = decode_report(one["report"], known)
                made.append(CachedGraph(traced=traced, report=report, breaks=one["breaks"]))
        return found


def _without_places(text: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what stands there for the reader alone."""
    nodes = [{key: value for key, value in node.items() if key != "module"} for node in text["nodes"]]
    return json.loads(json.dumps({**text, "nodes": nodes}))  # type: ignore[no-any-return]
