"""Recomputes a graph's fake values when some of its tensors get other strides: views, and ops whose results follow
strides."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from core.common.passes import Refused, value_of
from core.common.passes.metadata import fake_values
from core.common.passes.values.layouts import flat, memory, tensors
from core.common.passes.values.recipes import Recipe, call_key, recipe_of, signatures


class Relayout:
    """Reruns the fakes of what depends on changed values, as far as anything changes. One per graph.

    The layers of a model are alike: so the effect of a call on metadata is remembered and reused for equal calls.
    """

    def __init__(self, order: Mapping[fx.Node, int]) -> None:
        self._order = order
        self._recipes: dict[object, Recipe | None] = {}  # None: the call's result stays

    def consequences(self, changed: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Return the new values of all nodes that change, the given ones included.

        Raises `Refused` at a node that can't compute on the new strides. Nothing in the graph changes.
        """
        new = dict(changed)
        replaced = {memory(leaf) for node in changed for leaf in tensors(value_of(node))}
        waiting = [(self._order[user], user) for node in changed for user in node.users]
        heapq.heapify(waiting)
        seen: set[fx.Node] = set()
        while waiting:
            _, node = heapq.heappop(waiting)
            if node in seen or node.op == "output":
                continue
            seen.add(node)
            value = self._value(node, new, replaced)
            if value is not None:
                new[node] = value
                replaced.update(memory(leaf) for leaf in tensors(value_of(node)))
                for user in node.users:
                    heapq.heappush(waiting, (self._order[user], user))
        return new

    def _value(self, node: fx.Node, new: Mapping[fx.Node, Any], replaced: set[int]) -> Any:
        """Return the node's value computed from the new values, None if it does not change."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: new[n] if n in new else value_of(n))
        leaves = flat((args, tuple(kwargs.values())))
        old = value_of(node)
        before = signatures(flat(old))
        moved = any(memory(leaf) in replaced for leaf in tensors(old))
        key = (node.op, moved, before, call_key(node.target, args, kwargs, leaves))
        if key in self._recipes:
            known = self._recipes[key]
            return None if known is None else known.make(leaves)
        value = self._run(node, args, kwargs)
        if not moved and signatures(flat(value)) == before:
            self._recipes[key] = None
            return None
        recipe = recipe_of(value, leaves)
        if recipe is not None:
            self._recipes[key] = recipe
        return value

    @staticmethod
    def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target
        try:
            return fake_values(target, args, kwargs)[""]
        except Exception as error:  # whatever a kernel's checks raise
            text = str(error).partition("\n")[0]
            raise Refused(node, f"{node.name} can't compute on a slice of a wider result: {text}") from error
