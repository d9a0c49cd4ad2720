"""Read what a node computes from a tensor x, feature by feature: which elements of x, times which tables.

Models spell rotary embedding in dozens of ways: slices, chunks, stacks, reshapes to pairs, complex numbers. Between x
and the result they all only move, negate, cast, multiply with a table and add, so a reader follows these few operations
as index maps. The resulting map shows which features are paired. Leading dimensions must stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from core.common.passes import same_sizes, view
from core.common.passes.rotary.features import Column, Features, Table

_MAX_NODES = 64  # more than any rotation needs; the reader gives up on larger graphs


class Reader:
    """Reads nodes as features of one x; a node that does not depend on x alone reads as None.

    order: position of each node. operations: the function that reads each kind of node. reasons: why nodes that depend
    on x could not be read.
    """

    def __init__(self, x: fx.Node, order: Mapping[fx.Node, int], operations: Mapping[str, Operation]) -> None:
        sizes = view.shape(x) or ()
        self.x, self.order, self.lead = x, order, sizes[:-1]
        self._operations = operations
        self.dtype = view.dtype(x) or torch.float32
        columns: dict[Table | None, Column] = {None: (tuple(range(1, sizes[-1] + 1)), ())}
        self.known: dict[fx.Node, Features | None] = {x: Features((sizes[-1],), columns, self.dtype)}
        self.reasons: list[tuple[fx.Node, str]] = []

    def read(self, node: object) -> Features | None:
        """Return the features that a node holds, or None."""
        if not isinstance(node, fx.Node):
            return None
        if node in self.known:
            return self.known[node]
        # Nodes before x do not depend on it.
        if self.order[node] < self.order[self.x] or len(self.known) > _MAX_NODES:
            return None
        self.known[node] = None
        operation = self._operations.get(view.kind(node))
        found = operation(self, node) if operation is not None else None
        if found is not None and self.tail_of(node) == (found.tail[:-1] if found.is_complex else found.tail):
            self.known[node] = found
        return self.known[node]

    def nodes(self, result: fx.Node) -> tuple[fx.Node, ...]:
        """Return all nodes between x and a result that has been read, the result last."""
        found: dict[fx.Node, None] = {}
        pending = [result]
        while pending:
            node = pending.pop()
            if node is not self.x and node not in found and self.known.get(node) is not None:
                found[node] = None
                pending += node.all_input_nodes
        return tuple(sorted(found, key=self.order.__getitem__))

    def fail(self, node: fx.Node, reason: str) -> None:
        """Note why a node can't be read."""
        self.reasons.append((node, reason))

    def keeps_x(self, dtype: torch.dtype) -> bool:
        """Return whether x survives a cast to this dtype."""
        return view.is_exact(self.dtype, dtype)

    def tail_of(self, node: fx.Node) -> tuple[int, ...] | None:
        """Return a node's sizes after x's leading ones, or None where it has others."""
        sizes = view.shape(node) or ()
        tail = sizes[len(self.lead) :]
        fits = same_sizes(sizes[: len(self.lead)], self.lead) and all(isinstance(size, int) for size in tail)
        return tail if fits else None

    def axis(self, node: object, dim: object, extra: int = 0) -> int | None:
        """Return the tail dimension that a `dim` names, or None; extra: how many more dimensions the result has."""
        rank = len(view.shape(node) or ()) + extra
        if not isinstance(dim, int) or isinstance(dim, bool):
            return None
        axis = dim % rank - len(self.lead)
        return axis if axis >= 0 else None


Operation = Callable[[Reader, fx.Node], Features | None]
"""Reads a node as features of the reader's x; returns None where it can't."""
