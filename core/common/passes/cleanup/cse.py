"""Common subexpressions and dead code: compute equal calls of equal inputs once, and unused results not at all.

Dynamo unrolls layers, and each layer spells out its masks, positions and tables anew. A later call gives way to an
earlier one where both must give the same bits (no random numbers, no write into an input in between, no switch of modes
in between) and nobody can tell their results apart (`core.common.passes.cleanup.sharing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from core.common.passes import (
    LIFTS,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    Writes,
    is_impure,
    near_miss,
    remove_dead,
    site_name,
    value_of,
)
from core.common.passes.cleanup.sharing import Sharing, name_of, same_metadata, same_place


def run(context: PassContext) -> PassResult:
    """Let every repeated call give way to the first one, then remove what has no use and no effect."""
    search = _Search(context)
    for node in list(context.graph.nodes):
        search.visit(node)
    remove_dead(context.graph)
    return PassResult(matched=len(search.sites), sites=tuple(search.sites), near_misses=tuple(search.misses))


class _Unknown(Exception):
    """An argument of a kind whose equality can't be decided."""


class _Search:
    """One walk over a graph: calls seen so far by what they compute, and how often each storage has been written."""

    def __init__(self, context: PassContext) -> None:
        self._graph = context.graph
        self._writes: Writes = context.analysis("writes")
        self._sharing = Sharing(context)
        self._versions: dict[object, int] = {}
        self._seen: dict[object, fx.Node] = {}
        self.sites: list[str] = []
        self.misses: list[NearMiss] = []

    def visit(self, node: fx.Node) -> None:
        """Look for an earlier node with the same value, and use it in place of this node if that is safe."""
        written = self._writes.written.get(node)
        if written is not None:
            self._versions.update({key: self._versions.get(key, 0) + 1 for key in written})
            return
        if not node.op.startswith(("call_", "get_attr")):
            return
        if value_of(node) is None and _switches(node):
            self._seen.clear()
            return
        try:
            key = (node.op, node.target, _key(node.args), _key(node.kwargs), self._state(node))
        except _Unknown:
            return
        earlier = self._seen.setdefault(key, node)
        if earlier is node or not node.users or not same_metadata(node, earlier) or is_impure(node):
            return
        reason = self._refusal(node, earlier)
        if reason:
            self.misses.append(near_miss(node, f"{earlier.name} computes the same, but {reason}"))
            return
        self.sites.append(site_name(node))
        self._sharing.join(node, earlier)
        node.replace_all_uses_with(earlier)
        self._graph.erase_node(node)

    def _state(self, node: fx.Node) -> frozenset[tuple[object, int]]:
        """Return which versions of the written storages the node reads; a node that only views a storage reads none."""
        if not self._versions:
            return frozenset()
        read = self._writes.of(*node.all_input_nodes) - self._writes.of(node)
        return frozenset((key, self._versions[key]) for key in read if key in self._versions)

    def _refusal(self, node: fx.Node, earlier: fx.Node) -> str:
        """Return why the earlier result can't serve for the later one, or ""."""
        own, other = self._sharing.of(node), self._sharing.of(earlier)
        if not same_place(node, earlier):
            return "it lies at another place"
        if own == other:  # numbers, or views of one tensor
            return "its shape is changed in place" if own & self._sharing.reshaped else ""
        if own & other:
            return "only part of its memory is the same"
        return self._sharing.refusal(node, earlier, earlier)


_HARMLESS = frozenset({"_log_api_usage_once", "lazy_load_decompositions", "_assert_scalar", "_assert_async"}) | {
    "_vmap_increment_nesting",
    "_vmap_decrement_nesting",
}
"""Calls whose effect no other call can see: values inside a `vmap` are not plain tensors and are never joined."""


def _switches(node: fx.Node) -> bool:
    """Tell whether a call may change how later calls compute, as entering autocast does."""
    return name_of(node) not in _HARMLESS and is_impure(node)


_PLAIN = (str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis))


def _key(value: Any) -> object:
    """Return a key that two arguments share only if no callable can tell them apart: 1, 1.0 and True do not."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (bool, int, float, complex)):
        return type(value), repr(value)  # -0.0 equals 0.0, and no NaN equals itself
    if isinstance(value, (tuple, list)):
        return "tuple" if isinstance(value, tuple) else "list", *map(_key, value)
    if isinstance(value, slice):
        return "slice", _key(value.start), _key(value.stop), _key(value.step)
    if isinstance(value, Mapping):
        return "dict", *((name, _key(value[name])) for name in sorted(value))
    if isinstance(value, _PLAIN):
        return type(value), value
    raise _Unknown


ELIMINATE_COMMON_SUBEXPRESSIONS = Pass(
    name="eliminate_common_subexpressions",
    does="Let every repeated call give way to the first one, then remove what has no use and no effect.",
    run=run,
    after=("remove_no_ops", *LIFTS),
)
