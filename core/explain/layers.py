"""Explanations by layer: equal layers, their ops before and after, and near-misses by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from core.common.number_runs import runs_text
from core.compilation.rewrite.pass_report import PassReport
from core.explain.nodes import NodeRecord

OUTSIDE = "outside layers"
_LAYER = re.compile(r"^((?:[^.]+\.)*?\d+)(?:\.|$)")
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\b[A-Za-z_]\w*\b")


def layer_of(path: str) -> str:
    """Return the part of a module path up to its first number (`model.layers.3`), or "" where there is none."""
    match = _LAYER.match(path)
    return match[1] if match else ""


def compact(names: Iterable[str]) -> str:
    """Write names that differ in their first number as one, `model.layers.0-15,17.mlp`; join several by commas."""
    families: dict[tuple[str, str], list[int]] = {}
    for name in dict.fromkeys(names):
        match = _NUMBER.search(name)
        key = (name[: match.start()], name[match.end() :]) if match else (name, "")
        families.setdefault(key, []).extend([int(match[0])] if match else [])
    return ", ".join(f"{head}{runs_text(numbers)}{tail}" for (head, tail), numbers in families.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """Layers with equal counts."""

    layers: tuple[str, ...]
    #: Number of nodes by op, before and after the passes.
    before: Mapping[str, int]
    after: Mapping[str, int]
    #: Number of sites by pass: rewritten ones, and near-misses.
    matched: Mapping[str, int]
    missed: Mapping[str, int]

    @property
    def name(self) -> str:
        """The layers in short, `model.layers.0-15,17`."""
        return compact(self.layers)

    def counts(self, op: str) -> tuple[int, int]:
        """Return how many nodes of an op each layer has before and after the passes."""
        return self.before.get(op, 0), self.after.get(op, 0)


def ordered_ops(kinds: Sequence[LayerKind]) -> list[str]:
    """Return all ops of these layers: canonical ones first, and of each sort the most changed first."""
    names = {name for kind in kinds for counts in (kind.before, kind.after) for name in counts}

    def change(name: str) -> int:
        return max(abs(after - before) for before, after in (kind.counts(name) for kind in kinds))

    return sorted(names, key=lambda name: ("::" not in name, -change(name), name))


def layers_of(
    before: Sequence[NodeRecord], after: Sequence[NodeRecord], reports: Sequence[PassReport]
) -> dict[str, LayerKind]:
    """Return each layer on its own, in order of appearance; what belongs to none comes first, as "outside layers"."""
    ops_before, ops_after = count_ops(before), count_ops(after)
    matched = _sites({report.name: report.sites for report in reports})
    missed = _sites({report.name: [miss.site for miss in report.near_misses] for report in reports})
    names = dict.fromkeys([OUTSIDE, *ops_before, *ops_after, *matched, *missed])
    return {
        name: LayerKind(
            layers=(name,),
            before=ops_before.get(name, {}),
            after=ops_after.get(name, {}),
            matched=matched.get(name, {}),
            missed=missed.get(name, {}),
        )
        for name in names
    }


def layer_kinds(layers: Mapping[str, LayerKind]) -> tuple[LayerKind, ...]:
    """Join layers with equal counts."""
    kinds: dict[tuple[object, ...], list[LayerKind]] = {}
    for layer in layers.values():
        key = tuple(tuple(sorted(part.items())) for part in (layer.before, layer.after, layer.matched, layer.missed))
        kinds.setdefault((layer.layers == (OUTSIDE,), *key), []).append(layer)
    return tuple(replace(alike[0], layers=tuple(layer.layers[0] for layer in alike)) for alike in kinds.values())


def count_ops(nodes: Iterable[NodeRecord]) -> dict[str, Counter[str]]:
    """Return the number of nodes by layer and op."""
    counts: dict[str, Counter[str]] = {}
    for node in nodes:
        if node.is_call:
            counts.setdefault(layer_of(node.path) or OUTSIDE, Counter())[node.op] += 1
    return counts


def _sites(sites: Mapping[str, Iterable[str]]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for name, paths in sites.items():
        for path in paths:
            counts.setdefault(layer_of(path) or OUTSIDE, Counter())[name] += 1
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class MissGroup:
    """The near-misses of one pass whose reasons differ in names of nodes only."""

    pass_name: str
    #: The common reason, with the numbers of node names cut off.
    reason: str
    #: Site, node and full reason of each near-miss.
    sites: tuple[str, ...]
    nodes: tuple[str, ...]
    reasons: tuple[str, ...]
    #: The pass that claims these sites too; "" for none.
    claimant: str = ""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.sites)


def miss_groups(reports: Iterable[PassReport], names: frozenset[str]) -> tuple[MissGroup, ...]:
    """Group all near-misses, the most frequent of each pass first. names: of nodes, whose numbers mean nothing."""
    groups: list[MissGroup] = []
    for report in reports:
        alike: dict[tuple[str, str], list[int]] = {}
        for index, miss in enumerate(report.near_misses):
            alike.setdefault((_general(miss.reason, names), miss.claimant), []).append(index)
        for (reason, claimant), indices in sorted(alike.items(), key=lambda item: -len(item[1])):
            misses = [report.near_misses[index] for index in indices]
            groups.append(
                MissGroup(
                    pass_name=report.name,
                    reason=reason if len(misses) > 1 else misses[0].reason,
                    sites=tuple(miss.site for miss in misses),
                    nodes=tuple(miss.node for miss in misses),
                    reasons=tuple(miss.reason for miss in misses),
                    claimant=claimant,
                )
            )
    return tuple(groups)


def _general(reason: str, names: frozenset[str]) -> str:
    """Return the reason with node names cut to what they have in common: `silu_3` becomes `silu`."""

    def cut(match: re.Match[str]) -> str:
        return re.sub(r"_\d+$", "", match[0]) if match[0] in names else match[0]

    return _WORD.sub(cut, reason)
