"""The pass manager: orders passes by their declared constraints, runs each on a graph, lints, counts and times it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from torch.utils import _pytree as pytree

from core.common.passes.declaration import NearMiss, Pass, PassResult, Stage
from core.errors import PassError

if TYPE_CHECKING:
    from torch import fx

log = logging.getLogger("core.passes")


@dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """What one pass did: matches, rewritten sites, near-misses with their reasons, and its time in milliseconds."""

    name: str
    owner: str
    stage: Stage
    matched: int
    expected: int | None
    elapsed_ms: float
    sites: tuple[str, ...]
    near_misses: tuple[NearMiss, ...]

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


class PassManager:
    """Runs a fixed, ordered list of passes over graphs; the same list for every graph of a program."""

    def __init__(self, passes: Iterable[Pass], *, strict: bool = False) -> None:
        self.passes = order(tuple(passes))
        self._strict = strict

    def run(self, graph: fx.GraphModule, stage: Stage = "torch") -> tuple[PassReport, ...]:
        """Rewrite `graph` in place by every pass of the stage; raise `PassError` naming the pass and its owner."""
        return tuple(self._run_one(p, graph) for p in self.passes if p.stage == stage)

    def _run_one(self, declared: Pass, graph: fx.GraphModule) -> PassReport:
        start = time.perf_counter()
        try:
            interface = _interface(graph)
            result = declared.run(graph)
            if _interface(graph) != interface:
                raise ValueError("it changed the graph's placeholders or the number of its outputs")
            if not isinstance(result, PassResult):
                raise TypeError(f"it returned {result!r}, not a PassResult")
            graph.graph.lint()
            graph.recompile()
        except Exception as error:
            raise PassError(
                f"running pass {declared.name!r} of {declared.owner}",
                found=f"{type(error).__name__}: {error}",
                remedy=f"leave it out (passes without {declared.name!r}) and report it to {declared.owner}",
            ) from error
        report = self._report(declared, result, (time.perf_counter() - start) * 1e3)
        log.info("pass %s: %d matched in %.1f ms", report.name, report.matched, report.elapsed_ms)
        return report

    def _report(self, declared: Pass, result: PassResult, elapsed_ms: float) -> PassReport:
        if declared.expect is not None and result.matched != declared.expect:
            misses = "; ".join(f"{m.site}: {m.reason}" for m in result.near_misses) or "no near-miss reported"
            error = PassError(
                f"pass {declared.name!r} of {declared.owner}, which owes {declared.expect} matches",
                found=f"it matched {result.matched} ({misses})",
                remedy="look at the near-misses, or run without strict to go on unfused",
            )
            if self._strict:
                raise error
            log.warning("%s", error)
        return PassReport(
            name=declared.name,
            owner=declared.owner,
            stage=declared.stage,
            matched=result.matched,
            expected=declared.expect,
            elapsed_ms=elapsed_ms,
            sites=result.sites,
            near_misses=result.near_misses,
        )


def _interface(graph: fx.GraphModule) -> tuple[object, ...]:
    """What a graph is bound by: the names of its placeholders and the number of its outputs."""
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    return (*names, len(pytree.tree_leaves(graph.graph.output_node().args)))


def order(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return the passes in an order that keeps every before/after, else as registered; raise `PassError` on a cycle."""
    by_name: dict[str, Pass] = {}
    for declared in passes:
        _check(declared, by_name)
        by_name[declared.name] = declared
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for declared in passes:
        sorter.add(declared.name, *(name for name in declared.after if name in by_name))
        for later in declared.before:
            if later in by_name:
                sorter.add(later, declared.name)
    try:
        return tuple(by_name[name] for name in sorter.static_order())
    except CycleError as error:
        raise PassError(
            "ordering the passes",
            found="their before/after contradict each other: " + " -> ".join(error.args[1]),
            remedy="drop one of these constraints",
        ) from None


def _check(declared: Pass, known: dict[str, Pass]) -> None:
    if declared.name in known:
        raise PassError(
            f"pass {declared.name!r} of {declared.owner}",
            found=f"{known[declared.name].owner} registers a pass of the same name",
            remedy="rename one of them",
        )
    if declared.mechanism != "graph" or declared.stage != "torch":
        raise PassError(
            f"pass {declared.name!r} of {declared.owner} (mechanism {declared.mechanism!r}, stage {declared.stage!r})",
            found="this version of core runs mechanism 'graph' at stage 'torch' only",
            remedy="write it as a graph walk on the traced graph",
        )
