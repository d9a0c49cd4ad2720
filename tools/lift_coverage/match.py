"""Which of the oracle's sites the canonical ops of a rewritten graph stand for, and why not for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.ops.declaration import CanonicalOp, find_op
from core.common.passes.sites import site_name
from core.compilation.rewrite.pass_report import PassReport
from lift_coverage.oracle import KINDS, Site

# What one node of each canonical op stands for, in parts of each kind of site; rotations are counted by their results.
_STANDS_FOR: Mapping[str, Mapping[str, int]] = {
    "rms_norm": {"rms_norm": 1},
    "add_rms_norm": {"rms_norm": 1, "add_rms_norm": 1},
    "layer_norm": {"layer_norm": 1},
    "gated_activation": {"gated_activation": 1},
    "gated_activation_fused": {"gated_activation": 1},
    "grouped_mlp": {"gated_activation": 1, "experts": 1},
    "moe_route": {"moe_route": 1},
    "qk_norm_rotary": {"rms_norm": 2},
    "causal_conv1d_update": {"short_convolution": 1},
    "gated_delta_rule": {"recurrence": 1},
    "selective_state_update": {"recurrence": 1},
}
# Ops of these kinds may stand in a module beside the one in which the oracle saw the site.
_BESIDE = frozenset({"add_rms_norm", "moe_route", "experts"})
# Words of the names of the passes that lift a kind, where it is not the kind's own first word.
_PASS_WORDS: Mapping[str, tuple[str, ...]] = {
    "add_rms_norm": ("add_",),
    "experts": ("group",),
    "moe_route": ("route",),
    "short_convolution": ("conv1d",),
    "recurrence": ("delta_rule", "state_update"),
}
# Routing is written in as many ways as there are models; its forms show in the arguments of what it is lifted to.
_FORMLESS = frozenset({"layer_norm", "moe_route", "experts"})
_NO_CANDIDATE = "no candidate recognised"


@dataclass(frozen=True, kw_only=True, slots=True)
class Missed:
    """A site that no canonical op stands for. reason: a pass's, or that none saw a candidate there; node: where."""

    site: Site
    reason: str
    node: str = ""


def match_sites(
    sites: Sequence[Site], module: fx.GraphModule, reports: Sequence[PassReport]
) -> tuple[tuple[Missed, ...], tuple[str, ...]]:
    """Return the sites without a canonical op, and the canonical ops at no site, each as `kind at path`.

    A site takes ops of its kind in its own module first, then in modules around or inside it.
    """
    have = _canonical_parts(module)
    left = list(sites)
    for near in (_same, _above_or_below, _beside):
        left = [site for site in left if not _take(site, have[site.kind], near)]
    extra = [f"{kind} at {path}" for kind in KINDS for path, count in have[kind].items() for _ in range(count)]
    return tuple(_explained(site, reports) for site in left), tuple(extra)


def canonical_nodes(module: fx.GraphModule) -> Iterator[tuple[fx.Node, CanonicalOp]]:
    """Yield the graph's nodes that are canonical ops."""
    for node in module.graph.nodes:
        op = find_op(node.target) if node.op == "call_function" else None
        if op is not None:
            yield node, op


def signatures(sites: Sequence[Site], module: fx.GraphModule) -> tuple[str, ...]:
    """Return what tells forms apart: of sites as they were run, of canonical ops by their literal arguments."""
    ops = {f"core::{op.name}({_literals(op, node)})" for node, op in canonical_nodes(module)}
    forms = {f"{site.kind}: {site.form}" for site in sites if site.form and site.kind not in _FORMLESS}
    return tuple(sorted(ops | forms))


def disagreements(sites: Sequence[Site], module: fx.GraphModule) -> tuple[str, ...]:
    """Return the modules that the eager run called more or less often than the trace of the unrewritten graph did."""
    traced: dict[str, set[str]] = {}
    for node in module.graph.nodes:
        for key, entry in (node.meta.get("nn_module_stack") or {}).items():
            traced.setdefault(_path(entry), set()).add(key)
    found = []
    for kind in ("rms_norm", "layer_norm", "attention", "experts"):
        for path, count in Counter(site.path for site in sites if site.kind == kind).items():
            calls = len(traced.get(path, ()))
            if calls != count:
                found.append(f"{kind} at {path}: {count} calls in the eager run, {calls} in the trace")
    return tuple(found)


def _canonical_parts(module: fx.GraphModule) -> dict[str, Counter[str]]:
    """Return how many parts of each kind stand at each module path."""
    have: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for node, op in canonical_nodes(module):
        parts = dict(_STANDS_FOR.get(op.name, {}))
        if "rotary" in op.name:
            parts["rotary"] = len(op.overload._schema.returns)
        if "attention" in op.name:
            parts["attention"] = 1
        for kind, count in parts.items():
            have[kind][site_name(node)] += count
    return have


def _take(site: Site, have: Counter[str], near: Callable[[Site, str], bool]) -> bool:
    path = next((path for path, count in have.items() if count >= site.parts and near(site, path)), None)
    if path is not None:
        have[path] -= site.parts
    return path is not None


def _same(site: Site, path: str) -> bool:
    return site.path == path


def _above_or_below(site: Site, path: str) -> bool:
    return f"{site.path}.".startswith(f"{path}.") or f"{path}.".startswith(f"{site.path}.")


def _beside(site: Site, path: str) -> bool:
    return site.kind in _BESIDE and site.path.rpartition(".")[0] == path.rpartition(".")[0]


def _explained(site: Site, reports: Sequence[PassReport]) -> Missed:
    """Return the site with the reason of the nearest near-miss of a pass for its kind."""
    words = _PASS_WORDS.get(site.kind, (site.kind.partition("_")[0],))
    # A fusion builds on what was lifted: it has the reason only for what is a fusion itself.
    known = [report for report in reports if any(word in report.name for word in words)]
    known.sort(key=lambda report: not report.name.startswith("lift_"))
    found = [(miss, report.name) for report in known for miss in report.near_misses]
    for near in (_same, _above_or_below):
        for miss, name in found:
            if near(site, miss.site):
                return Missed(site=site, reason=f"{name}: {miss.reason}", node=miss.node)
    return Missed(site=site, reason=_NO_CANDIDATE)


def _path(entry: Any) -> str:
    """Return the path that the passes give a module of a graph's module stack."""
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"": entry}
    return site_name(node)


def _literals(op: CanonicalOp, node: fx.Node) -> str:
    bound = op.bind(node.args, node.kwargs).args
    return ", ".join(f"{key}={_literal(value)}" for key, value in sorted(bound.items()))


def _literal(value: Any) -> str:
    if isinstance(value, fx.Node):
        return "tensor"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number" if value else "0"
    return str(value)
