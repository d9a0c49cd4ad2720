"""Checks a pass's claims: each match is a change, each site has a name, its uuid is stable."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from torch import fx

from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Scalar
from core.common.passes.rewrite import remove_dead
from core.common.passes.sites import MADE_BY, Made, site_name
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core_conformance.cases.passes.runs import Bench, Change, Walk
from core_conformance.trial import Trial

Signature = tuple[Any, ...]


def signatures(module: fx.GraphModule) -> dict[str, Signature]:
    """Return the call of each node of a graph, by name, without unused nodes."""
    live = Snapshot(module).module()
    remove_dead(live.graph)
    return {node.name: (node.op, node.target, str(node.args), str(node.kwargs)) for node in live.graph.nodes}


def touched(before: fx.GraphModule, after: fx.GraphModule) -> tuple[list[str], list[str]]:
    """Return the names of nodes that a pass took away or changed, in graph order, and of those it made."""
    old, new = signatures(before), signatures(after)
    return [name for name, does in old.items() if new.get(name) != does], [name for name in new if name not in old]


def unclaimed(walk: Walk, declared: Pass) -> list[str]:
    """Return the claims in a pass's report that the graph contradicts."""
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
    """Return what is wrong with a second run of a pass over its own result, which must be correct again or do
    nothing."""
    report, again = bench.again(change, Snapshot(change.after).module())
    if report.error:
        return [f"a second run fails: {report.error}"]
    if again is None:
        return []
    if not any(touched(again.before, again.after)):
        return [f"a second run reports {report.matched} matches and changes nothing"] if report.matched else []
    fault = again.verification.fault
    return [] if fault is None else [f"a second run breaks {fault.where or fault.node}: {fault.reason}"]


def check_identity(trial: Trial, declared: Pass) -> None:
    """Compare a pass's uuid with that of an equal declaration, of one with other parameters, and of a new process."""
    uuid = declared.uuid()
    trial.require(replace(declared).uuid() == uuid, "two equal declarations have different uuids")
    for name, value in declared.params.items():
        other = replace(declared, params={**declared.params, name: _other(value)})
        trial.require(other.uuid() != uuid, f"the uuid is the same for {name}={value!r} and {name}={_other(value)!r}")
    elsewhere = _in_another_process(trial.name)
    if declared.name not in elsewhere:
        trial.note("the device as another process opens it has no such pass")
        return
    trial.require(elsewhere[declared.name] == uuid, "the uuid is another one in another process: no cache would hit")


def _other(value: Scalar) -> Scalar:
    if isinstance(value, bool):
        return not value
    return f"{value}'" if isinstance(value, str) else value + 1


@cache
def _in_another_process(device: str) -> Mapping[str, str]:
    """Return the uuids of a device's passes by name, from a process with another seed for its hashes."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-m", "core", "passes", "--device", device, "--json"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"`core passes --device {device} --json` fails: {done.stderr.strip()[-500:]}")
    return {each["name"]: each["uuid"] for each in json.loads(done.stdout)["passes"]}
