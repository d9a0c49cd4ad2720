"""The arguments of a Dynamo graph: which are weights, which carry sizes, and which are Python's floating numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from core.common.node_meta import value_of
from core.common.passes.constants import Constants
from core.common.passes.writes import find_writes

Key = tuple[Any, ...]
"""What distinguishes the shapes that one graph is called with."""


class Weights(Constants):
    """The weights among a graph's inputs, for passes that use them without reading their content.

    A caller may write into a weight at any time, through `.data` too, which leaves no trace. So what a pass computes
    from the content would go stale; a pass that joins weights keeps them as views of the joined tensor, and may.
    """

    def value(self, node: object) -> Tensor | None:
        """Return the weight of a placeholder; None for all other nodes, and where the pass may read its content."""
        return None if self.reads_content else super().value(node)


class Arguments:
    """The arguments of one graph by position."""

    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> None:
        """examples: the arguments of the first call; sizes as symbols."""
        self.nodes: tuple[fx.Node, ...] = tuple(graph.graph.find_nodes(op="placeholder"))
        fakes = list(map(value_of, self.nodes))
        self.weights = tuple(i for i, example in enumerate(examples) if is_weight(example))
        #: Sizes, and tensors with a size or stride that is a symbol.
        self._ints = tuple(i for i, fake in enumerate(fakes) if isinstance(fake, (torch.SymInt, int)))
        self._sized = tuple(i for i, fake in enumerate(fakes) if isinstance(fake, Tensor) and _is_symbolic(fake))
        #: Tensors of the host that hold a Python number each, which the graph reads by `item`.
        self.numbers = tuple(i for i, node in enumerate(self.nodes) if _items(node))
        writes = find_writes(graph)
        self.written = tuple(i for i, node in enumerate(self.nodes) if writes.writers(node))
        outputs = graph.graph.output_node().all_input_nodes
        returned = writes.of(*outputs)
        self.returned = tuple(i for i, node in enumerate(self.nodes) if writes.of(node) & returned)
        self._tensors = tuple(i for i, fake in enumerate(fakes) if isinstance(fake, Tensor))

    @property
    def is_static(self) -> bool:
        """True where one callable serves every call."""
        return not (self._ints or self._sized)

    def shape_key(self, args: Sequence[Any]) -> Key:
        """Return the shapes, strides and sizes in which calls may differ."""
        sizes = tuple(args[i] for i in self._ints)
        return sizes + tuple((args[i].shape, args[i].stride()) for i in self._sized)

    def number_key(self, args: Sequence[Any]) -> tuple[float, ...]:
        """Return the Python numbers that calls may differ in."""
        return tuple(args[i].item() for i in self.numbers)

    def copied(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the tensors that are new at each call."""
        return tuple(i for i in self._tensors if i not in self.weights and isinstance(values[i], Tensor))

    def shares_memory(self, args: Sequence[Any]) -> bool:
        """Tell whether an argument that the graph writes into lies in the storage of another one."""
        storages = [args[i].untyped_storage()._cdata for i in self._tensors]
        return len(set(storages)) < len(storages) and self._written_among(storages)

    def _written_among(self, storages: Sequence[int]) -> bool:
        places = dict(zip(self._tensors, storages, strict=True))
        return any(storages.count(places[i]) > 1 for i in self.written)


def is_weight(example: Any) -> bool:
    """Tell whether an argument is a module's parameter or buffer, or was declared to stay where it is."""
    return isinstance(example, Parameter) or getattr(example, "_dynamo_static_input_type", None) is not None


def hint(value: Any) -> Any:
    """Return the value that a symbolic size had at the first call; asking for `int` would fix the size for ever."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


def sizes_of(examples: Sequence[Any], nodes: Sequence[fx.Node]) -> dict[Any, int]:
    """Return what each symbol of the graph was at the first call."""
    found: dict[Any, int] = {}
    for node, example in zip(nodes, examples, strict=True):
        fake = value_of(node)
        pairs = zip(fake.shape, example.shape, strict=True) if isinstance(fake, Tensor) else [(fake, example)]
        for symbolic, value in pairs:
            expression = getattr(getattr(symbolic, "node", None), "expr", None)
            if expression is not None and expression.is_Symbol:
                found[expression] = int(hint(value))
    return found


def fix_numbers(graph: fx.GraphModule, numbers: dict[int, float]) -> None:
    """Replace, in place, what a graph reads of the placeholders at these positions by the numbers themselves."""
    nodes = graph.graph.find_nodes(op="placeholder")
    for position, number in numbers.items():
        for item in _items(nodes[position]):
            for user in list(item.users):
                constant = partial(_constant, {item: number})
                user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), constant)
            graph.graph.erase_node(item)
    graph.recompile()


def _constant(numbers: Mapping[fx.Node, float], node: fx.Node) -> Any:
    return numbers.get(node, node)


def _items(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read the one number of a placeholder; none unless it is a scalar."""
    fake = value_of(node)
    if not isinstance(fake, Tensor) or fake.dim():
        return []
    users = [user for user in node.users if user.target in ("item", torch.ops.aten.item.default)]
    symbolic = [user for user in users if isinstance(value_of(user), torch.SymFloat)]
    return symbolic if len(symbolic) == len(node.users) else []


def _is_symbolic(fake: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*fake.shape, *fake.stride()))
