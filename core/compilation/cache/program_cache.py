"""The compile cache of one program: loads the graphs of its entry, and writes an entry after a compile."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from core.common.lowering import UNKEPT, Artifacts
from core.compilation.cache import factors, graphs
from core.compilation.cache.artifacts import GraphArtifacts
from core.compilation.cache.differences import Difference, Places, brief, each_line, explain, shown
from core.compilation.cache.entry import Damaged, Gone
from core.compilation.cache.folders import Untrusted
from core.compilation.cache.literals import Targets
from core.compilation.cache.lookups import ABSENT
from core.compilation.cache.reading import Layouts, Reading, content_of, content_path, expressions_of
from core.compilation.cache.reports import CachedGraph, decode_report, encode_report
from core.compilation.cache.source import source_place
from core.compilation.cache.store import SOURCE, Store, key_of
from core.compilation.cache.uncacheable import Uncacheable
from core.compilation.cache.values import names_in
from core.compilation.capture.alike import Cut
from core.compilation.report import CacheReport

if TYPE_CHECKING:
    from core.common.passes.declaration import Pass
    from core.compilation.request import CompileRequest
    from core.device import Mode

log = logging.getLogger("core.cache")
_MOST_IN_REASON, _MOST_LINES, _MOST_TRIED = 3, 24, 16
MAX_CONTENT_BYTES = 1 << 20
"""Limit on the bytes whose content the passes of one graph may read: digests of more would cost what the cache
saves."""


class ProgramCache:
    """The entry of one program. `report` says what it did; a failure here never fails the compile."""

    def __init__(self, request: CompileRequest, passes: Sequence[Pass]) -> None:
        """Look for the program's entry. passes: those that may run, in order."""
        self._models = request.models
        self._table = request.table
        self._packages = factors.plugin_packages(request.device)
        self._whole = self._packages | factors.runtime_packages(request.device)
        self._targets = Targets(request.device.ops, self._packages)
        self._store = Store.of_user()
        self._made: dict[tuple[str, str], list[CachedGraph]] = {}
        self._under_way: set[str] = set()
        self._found: dict[tuple[str, str], list[CachedGraph]] = {}
        self._used: Mapping[str, Any] = {"names": (), "values": {}}
        self._traced: dict[str, Mapping[str, str]] = {}
        self.report = CacheReport(state="miss", folder=str(self._store.folder))
        try:
            self._layouts = Layouts(request.models)
            self._factors = factors.factors_of(request, passes, self._packages)
            self._look()
        except Untrusted as refusal:
            self._refuse(str(refusal))
        except Exception as error:  # reading a model's objects may raise anything
            self._refuse(f"the model can't be read: {type(error).__name__}: {error}")

    def load(self, phase: str, mode: Mode) -> list[CachedGraph] | None:
        """Return the graphs of a phase in a mode; None where the entry has none."""
        return self._found.get((phase, mode))

    def keep(self, phase: str, mode: Mode, made: Sequence[CachedGraph]) -> None:
        """Note the graphs of a phase that were made now, for `save`, and what their traces read."""
        self._made[phase, mode] = list(made)
        if self.report.state in ("refused", "off"):
            return
        try:
            self._traced[phase] = self._read(self._expressions(phase, made)).values
        except Uncacheable as reason:
            self._refuse(str(reason))
        except Exception as error:  # as in `save`
            self._refuse(f"what the trace read can't be read again: {type(error).__name__}: {error}")

    def artifacts(self, graph: fx.GraphModule, values: tuple[Any, ...]) -> Artifacts:
        """Return where a lowering keeps its artefacts of a finished graph; nowhere if the cache is not used.

        graph: must not change while the lowering runs. values: of its placeholders.
        """
        if self.report.state == "refused":
            return UNKEPT
        return GraphArtifacts(
            folders=self._store.lowered,
            graph=graph,
            values=values,
            targets=self._targets,
            packages=self._packages,
            factors=self._factors,
            under_way=self._under_way,
        )

    @property
    def keeps_artifacts(self) -> bool:
        """Whether a lowering's artefacts of a graph are there for equal graphs; it asks the folder."""
        try:
            self._store.lowered.open()
        except (OSError, Untrusted):
            return False
        return self.report.state != "refused"

    def save(self) -> None:
        """Write the entry if anything was made; log the reason if that fails."""
        if not self._made or self.report.state in ("refused", "off"):
            return
        try:
            path = self._write()
        except Uncacheable as reason:
            self._refuse(str(reason))
        except Exception as error:  # the program is made; failing to keep it must not lose it
            self._refuse(f"the entry can't be written: {type(error).__name__}: {error}")
        else:
            log.info("compile cache: wrote %s", path)
            self.report = replace(self.report, key=path.name)

    def _refuse(self, reason: str) -> None:
        log.warning("compile cache: not used for this program: %s", reason)
        self.report = replace(self.report, state="refused", reason=reason)

    def _look(self) -> None:
        """Take the first entry under the program's key for which everything that its trace read is unchanged."""
        nearest: tuple[str, list[Difference]] | None = None
        damaged = ""
        for name in self._store.candidates(key_of(self._factors), most=_MOST_TRIED):
            try:
                reads = self._store.reads(name)
                live = self._read(reads["values"], reads["names"], strict=False)
                if changed := _changed(reads["values"], live.values):
                    nearest = (name, changed) if nearest is None or len(changed) < len(nearest[1]) else nearest
                    continue
                self._found = self._decode(self._store.graphs(name, self._factors), live)
            except Untrusted:
                raise
            except Gone:
                continue
            except Exception as error:  # whatever is wrong with an entry, the program can be compiled
                damaged = self._discard(name, error)
                continue
            self._used = reads
            num_graphs = sum(map(len, self._found.values()))
            log.info("compile cache: hit %s, %d graphs from %s", name[:12], num_graphs, self._store.folder)
            self.report = replace(self.report, state="hit", key=name)
            return
        self._explain_miss(nearest or (None if damaged else self._nearest()), damaged)

    def _nearest(self) -> tuple[str, list[Difference]] | None:
        """Return the entry of the same model with the fewest differing factors, and the differences."""
        found = self._store.nearest(self._factors)
        if found is None:
            return None
        name, unlike = found
        with suppress(Exception):  # the entry is reported, not used
            reads = self._store.reads(name)
            live = self._read(reads["values"], reads["names"], strict=False)
            # A missing value may belong to a phase that this program does not have.
            unlike += [each for each in _changed(reads["values"], live.values) if each.now != ABSENT]
        return name, unlike

    def _discard(self, name: str, error: Exception) -> str:
        wrong = isinstance(error, (Damaged, Uncacheable))
        reason = str(error) if wrong else f"it can't be read: {type(error).__name__}: {error}"
        log.warning("compile cache: entry %s is not used and made anew: %s", name, reason)
        self._store.discard(name)
        return reason

    def _explain_miss(self, nearest: tuple[str, list[Difference]] | None, damaged: str) -> None:
        if nearest is None:
            reason = damaged or "no entry of this model on this device yet"
            log.info("compile cache: miss: %s", reason)
            self.report = replace(self.report, reason=reason)
            return
        name, found = nearest
        told = partial(explain, found, self._store.places(name), self._places())
        differ = "1 factor differs" if len(found) == 1 else f"{len(found)} factors differ"
        log.info("compile cache: miss; nearest is %s, %s:", name, differ)
        for line in told():
            log.info("compile cache:   %s", line)
        said = "; ".join(told(most=_MOST_IN_REASON)) if len(found) <= _MOST_LINES else brief(*told.args)
        reason = f"{differ} from {name[:12]}: {said}"
        lines = tuple(each_line([str(each) for each in found], most=_MOST_LINES))
        self.report = replace(self.report, reason=reason, differences=lines)

    def _places(self) -> Places:
        return {package: source_place(package) for package in self._factors["source"]}

    def _read(self, expressions: Iterable[str], names: Iterable[str] = (), *, strict: bool = True) -> Reading:
        reading = Reading(self._models, frozenset(names), self._layouts)
        with torch.no_grad():  # as a trace reads
            reading.read(expressions, strict=strict)
        return reading

    def _expressions(self, phase: str, made: Sequence[CachedGraph]) -> list[str]:
        found: list[str] = []
        for each in made:
            assert each.traced.reads is not None  # made now
            hands_through = any(ref.index < 0 and not ref.name for ref in each.traced.output.leaves)
            found += expressions_of(each.traced.reads, phase, hands_through=hands_through)
        return found

    def _write(self) -> Path:
        made = [(phase, each) for (phase, _), several in self._made.items() for each in several]
        codes = {code for _, each in made for code in each.traced.code}
        names = names_in(codes).union(self._used["names"])
        for was in self._traced.values():
            for each in _changed(was, self._read(was).values):
                raise Uncacheable(f"{each.name} was {each.was} when it was traced, and is {each.now} now")
        live = self._read({*self._used["values"], *(each for was in self._traced.values() for each in was)}, names)
        if absent := [name for name, text in live.values.items() if text == ABSENT and not name.startswith(_MAY_LACK)]:
            raise Uncacheable(f"the trace read {absent[0]}, which can't be read again")
        for code in codes:
            if code not in live.texts.codes and factors.is_foreign_code(code, self._whole):
                where = f"{code.co_filename}:{code.co_firstlineno}"
                raise Uncacheable(f"the trace ran through {code.co_qualname} ({where}), to which nothing leads it read")
        live.read(self._contents([tensor for _, each in made for tensor in each.contents], live))
        text = {"names": sorted(names), "values": live.values}
        return self._store.write(key_of(self._factors), self._factors, text, self._encode(live))

    def _contents(self, tensors: Sequence[Tensor], reading: Reading) -> list[str]:
        """Return expressions for the content of tensors that passes have read."""
        unique = {id(tensor): tensor for tensor in tensors}.values()
        if sum(tensor.nbytes for tensor in unique) > MAX_CONTENT_BYTES:
            raise Uncacheable(
                f"passes have read the content of {len(unique)} tensors of over {MAX_CONTENT_BYTES} bytes"
            )
        paths = [reading.path_of(tensor) for tensor in unique]
        if None in paths:
            raise Uncacheable("a pass has read the content of a tensor that is none of the model's")
        return [content_of(path) for path in paths if path]

    def _encode(self, reading: Reading) -> dict[str, Any]:
        phases = []
        for (phase, mode), made in {**self._found, **self._made}.items():
            texts = [self._encode_one(each, reading) for each in made]
            phases.append({"phase": phase, "mode": mode, "graphs": texts})
        return {"phases": phases, SOURCE: {package: asdict(place) for package, place in self._places().items()}}

    def _encode_one(self, made: CachedGraph, reading: Reading) -> dict[str, Any]:
        failed = [each.name for each in made.report.passes if each.error]
        if failed:
            raise Uncacheable(f"passes were undone: {', '.join(failed)}")
        text = graphs.encode_graph(made.traced, self._targets, reading.path_of)
        # Convert through JSON, to compare what a later process would read.
        again = graphs.decode_graph(json.loads(json.dumps(text)), self._targets, reading.tensors)
        if _without_places(graphs.encode_graph(again, self._targets, reading.path_of)) != _without_places(text):
            raise Uncacheable(f"the graph of {made.report.phase} does not read back as itself")
        return {
            "breaks": made.breaks,
            "cut": made.cut and made.cut.to_json(),
            "report": encode_report(made.report),
            "graph": text,
        }

    def _decode(self, text: Mapping[str, Any], live: Reading) -> dict[tuple[str, str], list[CachedGraph]]:
        contents = tuple(live.tensors[path] for each in live.values if (path := content_path(each)))
        known = [key for keys in self._table.phases.values() for key in keys]
        found: dict[tuple[str, str], list[CachedGraph]] = {}
        for each in text["phases"]:
            made = found[each["phase"], each["mode"]] = []
            for one in each["graphs"]:
                traced = graphs.decode_graph(one["graph"], self._targets, live.tensors)
                report = decode_report(one["report"], known)
                how = {"breaks": one["breaks"], "cut": Cut.from_json(one["cut"]), "contents": contents}
                made.append(CachedGraph(traced=traced, report=report, **how))
        return found


_MAY_LACK = ("environment(", "builtin(")


def _changed(was: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    return [Difference("values", shown(name), text, now[name]) for name, text in was.items() if now[name] != text]


def _without_places(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text of a graph without the modules of its nodes, which only a reader needs."""
    nodes = [{key: value for key, value in node.items() if key != "module"} for node in text["nodes"]]
    return json.loads(json.dumps({**text, "nodes": nodes}))  # type: ignore[no-any-return]
