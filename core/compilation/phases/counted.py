"""Phases whose models count on Python integers: one graph per control-flow path that depends on these numbers.

Each graph is valid under conditions on the numbers (`TracedGraph.counting`). The paths are found beforehand by
advancing the numbers as the graphs would, without running the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.compilation.trace.counters import Counting, Numbers
from core.compilation.trace.traced import CounterSlot

if TYPE_CHECKING:
    from core.common.lowering import FlatCallable
    from core.compilation.trace.traced import OutputTree, TracedGraph

MAX_WAYS = 4
"""Most graphs for one bucket; a model with more paths runs eagerly."""
NUM_AHEAD = 4096
"""Runs that the search for another path looks ahead; a path that comes later is noticed at run time and runs
eagerly."""


def first_uncovered(countings: Sequence[Counting]) -> Numbers | None:
    """Return the first values of the counters, from the present ones on, for which none of these traces is valid."""
    numbers = {key: value for counting in countings for key, value in counting.present().items()}
    for _ in range(NUM_AHEAD):
        holding = next((counting for counting in countings if counting.holds(numbers)), None)
        if holding is None:
            return numbers
        after = holding.after(numbers)
        if after == numbers:
            return None
        numbers = after
    return None


class CountedRun:
    """Runs the graph that is valid for the present numbers, and advances the numbers."""

    def __init__(
        self,
        ways: Sequence[tuple[TracedGraph, FlatCallable]],
        inputs: Mapping[str, Tensor],
        eager: Callable[[], tuple[Tensor, ...]],
    ) -> None:
        """ways: traces of one bucket, each with its lowered callable. eager: runs the model if no trace is valid."""
        self._eager = eager
        self._ways = []
        for traced, lowered in ways:
            # Aliases keep the memory of tensors alive even if the model's parameters later point elsewhere.
            values = [value.detach() if isinstance(value, Tensor) else value for value in traced.values(inputs)]
            slots = [(i, slot) for i, slot in enumerate(traced.slots) if isinstance(slot, CounterSlot)]
            self._ways.append((traced.counting(inputs), values, slots, lowered))

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, ...]:
        """Run on the present content of the inputs and return the graph's outputs."""
        for counting, values, slots, lowered in self._ways:
            numbers = counting.present()
            if counting.holds(numbers):
                for index, slot in slots:
                    values[index] = getattr(slot.owner, slot.name)
                outputs = lowered(*values)
                counting.assign(counting.after(numbers))
                return outputs
        return self._eager()


def flat_outputs(tree: OutputTree, result: Any) -> tuple[Tensor, ...]:
    """Convert the model's result to the flat outputs of a graph with this output structure."""
    leaves = pytree.tree_leaves(result)
    found = {ref.index: leaf for ref, leaf in zip(tree.leaves, leaves, strict=True) if ref.index >= 0}
    return tuple(found[index] for index in sorted(found))


def same_structure(one: OutputTree, other: OutputTree) -> bool:
    """Tell whether two graphs' outputs rebuild to the same structure of the model's output."""
    refs = [[(ref.index, ref.name, type(ref.value)) for ref in tree.leaves] for tree in (one, other)]
    return one.spec == other.spec and refs[0] == refs[1]
