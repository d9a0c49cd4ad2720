"""Finds the first value at which two graphs differ, for faults that no site shows: lost writes, removed nodes, wrong
wiring."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.common.node_meta import value_of
from core.common.passes.sites import MADE_BY, site_name
from core.verify.compare import compare
from core.verify.execution import Copies, Watcher, changing_nodes, run_graph

MAX_BYTES = 2**30
"""Memory for the values of one round, in bytes; a graph with more is run several times."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The place where two graphs first differ."""

    #: The node of the graph after.
    node: str
    #: Its module path.
    site: str
    reason: str
    #: The error of its value, over the bound.
    ratio: float


def first_divergence(
    pass_name: str,
    before: tuple[fx.GraphModule, Sequence[Any]],
    after: tuple[fx.GraphModule, Sequence[Any]],
    decided: Mapping[str, Any],
    pinned: Mapping[str, Any],
    codes: Collection[str] = (),
) -> Divergence | None:
    """Return the first node of the graph after whose value is not that of its counterpart before, or None.

    Counterparts have the same name, or one replaced the other. None also where the fp64 run fails.

    - decided, pinned: what the fp64 run, and the run of the graph after, take as decided.
    - codes: nodes of the graph before with codes that the pass may move.
    """
    for names in _rounds(pass_name, before[0], after[0]):
        old, new, exact = _Values(before[0], names.values()), _Values(after[0], names), _Values(before[0], ())
        try:
            run_graph(*before, watchers=[old])
            run_graph(*after, watchers=[new], pinned=pinned)
        except Exception:  # the graph after can't be run to its end: what was seen until then is compared
            pass
        for name, counterpart in names.items():
            if name not in new.seen or counterpart not in old.seen:
                continue
            if not exact.wanted and _judge(new.seen[name], old.seen[counterpart], None)[0]:
                exact = _Values(before[0], names.values())
                try:
                    run_graph(*before, watchers=[exact], fp64=True, pinned=decided)
                except Exception:
                    return None
            values = new.seen[name], old.seen[counterpart], exact.seen.get(counterpart)
            reason, ratio = _judge(*values, codes=counterpart in codes)
            if reason:
                node = next(node for node in after[0].graph.nodes if node.name == name)
                return Divergence(name, site_name(node), f"here the graphs part: {reason}", ratio)
    return None


def _rounds(pass_name: str, before: fx.GraphModule, after: fx.GraphModule) -> Iterator[dict[str, str]]:
    """Yield names in the graph after with their counterparts before, in graph order, as many as memory allows."""
    olds = {node.name for node in before.graph.nodes if node.op.startswith("call_")}
    names: dict[str, str] = {}
    size = 0
    for node in after.graph.nodes:
        made = node.meta.get(MADE_BY)
        own = made is not None and made.pass_name == pass_name
        counterpart = (made.replaced[0] if made.replaced else "") if own else node.name
        if not node.op.startswith("call_") or counterpart not in olds:
            continue
        names[node.name] = counterpart
        leaves = [leaf for leaf in pytree.tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
        numbers = (leaf.numel() for leaf in leaves)
        size += 16 * sum(number for number in numbers if isinstance(number, int))  # two runs, and one in fp64
        if size > MAX_BYTES:
            yield names
            names, size = {}, 0
    if names:
        yield names


class _Values(Watcher):
    """Keeps the values of some nodes as they were when computed."""

    def __init__(self, module: fx.GraphModule, wanted: Any) -> None:
        self.wanted, self.seen = frozenset(wanted), dict[str, Any]()
        self._changing = changing_nodes(module)

    def after(self, node: fx.Node, value: Any) -> None:
        """Keep the value, or a copy of it where its memory is written."""
        if node.name in self.wanted:
            changes = node.name in self._changing
            self.seen[node.name] = pytree.tree_map(Copies().of, value) if changes else value


def _judge(result: Any, old: Any, exact: Any, *, codes: bool = False) -> tuple[str, float]:
    """Judge a value leaf by leaf; without a reference whatever differs in a bit is wrong."""
    news, olds = pytree.tree_leaves(result), pytree.tree_leaves(old)
    references = pytree.tree_leaves(exact) if exact is not None else [None] * len(olds)
    if not len(news) == len(olds) == len(references):
        return f"{len(news)} values instead of {len(olds)}", float("inf")
    for new, known, reference in zip(news, olds, references, strict=True):
        outcome = compare(new, known, lambda reference=reference: reference, codes=codes)  # type: ignore[misc]
        reason, ratio = outcome if outcome is not None else ("it differs", float("inf"))
        if reason:
            return reason, ratio
    return "", 0.0
