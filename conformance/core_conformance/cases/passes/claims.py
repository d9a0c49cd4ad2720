"""Whether a pass reports what it did: a change for each match it claims, a name for each site, its promise kept."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from core.common.passes.declaration import Pass
from core.common.passes.rewrite import remove_dead
from core.common.passes.sites import MADE_BY, Made, site_name
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core_conformance.cases.passes.runs import Bench, Change, Walk

Signature = tuple[Any, ...]


def signatures(module: fx.GraphModule) -> dict[str, Signature]:
    """Return what each node of a graph does, by name, without what nothing uses."""
    live = Snapshot(module).module()
    remove_dead(live.graph)
    return {node.name: (node.op, node.target, str(node.args), str(node.kwargs)) for node in live.graph.nodes}


def touched(before: fx.GraphModule, after: fx.GraphModule) -> tuple[list[str], list[str]]:
    """Return the names of nodes that a pass took away or changed, in graph order, and of those it made."""
    old, new = signatures(before), signatures(after)
    return [name for name, does in old.items() if new.get(name) != does], [name for name in new if name not in old]


def unclaimed(walk: Walk, declared: Pass) -> list[str]:
    """Return what a pass's report on one graph says that the graph does not bear out."""
    report, change = walk.reports[declared.name], walk.changes.get(declared.name)
    reasons = [] if change is None else list(_false_claims(report, change))
    if report.expected is not None and report.expected != report.matched:
        reasons.append(f"it owes {report.expected} matches by its own `expect` and has {report.matched}")
    return reasons


def _false_claims(report: PassReport, change: Change) -> Iterator[str]:
    gone, made = touched(change.before, change.after)
    if not gone and not made:
        if report.matched:
            yield f"it reports {report.matched} matches and left the graph as it was"
        return
    if not report.matched:
        yield f"it reports no match and changed the graph (at {(gone or made)[0]})"
        return
    if report.matched > len(gone) + len(made):
        yield f"it reports {report.matched} matches and changed {len(gone) + len(made)} nodes"
    marked = _marked_sites(report.name, change)
    if marked is not None and marked < report.matched:
        yield f"it reports {report.matched} matches, and the nodes that it made replace {marked} sites"
    if len(report.sites) != report.matched:
        yield f"it names {len(report.sites)} sites for {report.matched} matches"
    known = {text for module in (change.before, change.after) for node in module.graph.nodes for text in _names(node)}
    unknown = [site for site in report.sites if site not in known]
    if unknown:
        yield f"it names site {unknown[0]!r}, which is neither a module nor a node of the graph"


def _names(node: fx.Node) -> Iterator[str]:
    """Yield the names that a site at this node may have: its own, its module's, and those of the modules around it."""
    yield node.name
    parts = site_name(node).split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _marked_sites(name: str, change: Change) -> int | None:
    """Count the sites that a pass marked on the nodes it made; None where it marks none or rewrites its own work."""
    olds = {node.name for node in change.before.graph.nodes}
    sites: set[fx.Node] = set()
    for node in change.after.graph.nodes:
        made: Made | None = node.meta.get(MADE_BY)
        if made is None or made.pass_name != name or not made.replaced:
            continue
        if not olds.issuperset(made.replaced):
            return None
        # The results of one op with several outputs are one site.
        while node.target in (operator.getitem, "transpose"):
            source = node.args[0]
            if not isinstance(source, fx.Node) or source.name in olds:
                break
            node = source
        sites.add(node)
    return len(sites) or None


def unstable(bench: Bench, change: Change) -> list[str]:
    """Return what is wrong with a second run of a pass over what it left: it must be right again, or do nothing."""
    report, again = bench.again(change, Snapshot(change.after).module())
    if report.error:
        return [f"a second run fails: {report.error}"]
    if again is None:
        return []
    if not any(touched(again.before, again.after)):
        return [f"a second run reports {report.matched} matches and changes nothing"] if report.matched else []
    fault = again.verification.fault
    return [] if fault is None else [f"a second run breaks {fault.where or fault.node}: {fault.reason}"]
