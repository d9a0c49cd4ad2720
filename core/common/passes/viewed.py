"""Nodes seen through lossless views, and the inverse views: for ops whose order of dimensions differs from the models'.

A site names an argument or a result of its op as such a view of a node in the graph; the views are inserted with the
op. The views are spelled as in graphs of stage `torch`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from core.common.node_meta import value_of
from core.common.passes.values.fresh import reread
from core.common.passes.values.sizes import same_sizes
from core.common.passes.view import swapped_dims


@dataclass(frozen=True, slots=True)
class Swap:
    """Two dimensions, counted from the front, change places."""

    first: int
    second: int

    @property
    def inverse(self) -> Swap:
        """The inverse view: the same transposition."""
        return self

    def make(self, x: fx.Node) -> fx.Node:
        """Insert this view of a node."""
        return x.graph.call_method("transpose", (x, self.first, self.second))

    def is_made(self, node: fx.Node) -> bool:
        """Tell whether a node is this view of its first argument."""
        return {*(swapped_dims(node) or ())} == {self.first, self.second}

    def of(self, value: FakeTensor) -> FakeTensor:
        """Return this view of a fake tensor."""
        dims = list(zip(value.shape, value.stride(), strict=True))
        dims[self.first], dims[self.second] = dims[self.second], dims[self.first]
        return _reread(value, dims)


@dataclass(frozen=True, slots=True)
class Index:
    """What `x[index]` is: 0 drops a dimension of size 1, None adds one, a whole slice keeps one."""

    index: tuple[Any, ...]

    @property
    def inverse(self) -> Index:
        """The inverse view: adds each dimension that this one drops, and drops each that it adds."""
        return Index(tuple(0 if each is None else None if each == 0 else each for each in self.index))

    def make(self, x: fx.Node) -> fx.Node:
        """Insert this view of a node."""
        index = self.index if len(self.index) > 1 else self.index[0]
        return x.graph.call_function(operator.getitem, (x, index))

    def is_made(self, node: fx.Node) -> bool:
        """Tell whether a node is this view of its first argument."""
        index = node.args[1] if node.target is operator.getitem else ()
        index = index if isinstance(index, tuple) else (index,)
        pairs = zip(index, self.index, strict=False)
        return len(index) == len(self.index) and all(type(own) is type(each) and own == each for own, each in pairs)

    def of(self, value: FakeTensor) -> FakeTensor:
        """Return this view of a fake tensor."""
        dims = list(zip(value.shape, value.stride(), strict=True))
        kept: list[tuple[Any, Any]] = []
        for each in self.index:
            if each is None:
                size, stride = dims[0] if dims else (1, 1)
                kept.append((1, size * stride))
            elif each == 0:
                dims.pop(0)
            else:
                kept.append(dims.pop(0))
        return _reread(value, [*kept, *dims])


Step = Swap | Index


def _reread(value: FakeTensor, dims: Sequence[tuple[Any, Any]]) -> FakeTensor:
    return reread(value, [size for size, _ in dims], [stride for _, stride in dims], value.storage_offset())


@dataclass(frozen=True, slots=True)
class Viewed:
    """A node seen through a chain of views; without views, the node itself."""

    node: fx.Node
    steps: tuple[Step, ...] = ()

    @property
    def way_back(self) -> tuple[Step, ...]:
        """The steps that lead from the view back to the node."""
        return tuple(step.inverse for step in reversed(self.steps))

    @property
    def value(self) -> Any:
        """The fake value of the view, None if unknown; it shares memory with the node's fake value."""
        return through(value_of(self.node), self.steps)


def viewed(item: fx.Node | Viewed) -> Viewed:
    """Return a node as a `Viewed` without steps, and a `Viewed` unchanged."""
    return item if isinstance(item, Viewed) else Viewed(item)


def through(value: Any, steps: Sequence[Step]) -> Any:
    """Return a fake value seen through views; None if there is no value."""
    for step in steps:
        value = step.of(value) if isinstance(value, FakeTensor) else None
    return value


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, by position and by name; they may hold nodes and views of nodes."""


def sources_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Viewed, ...]:
    """Return the nodes among arguments, and the views of nodes, in order, repeated ones each time."""
    found: list[Viewed] = []
    mapped(args, kwargs, found.append)
    return tuple(found)


def mapped(args: tuple[Any, ...], kwargs: Mapping[str, Any], make: Callable[[Viewed], Any]) -> Call:
    """Return a call's arguments with each node and each view replaced by the result of `make`."""

    def each(leaf: Any) -> Any:
        return make(viewed(leaf)) if isinstance(leaf, (fx.Node, Viewed)) else leaf

    found: Any = map_aggregate((args, dict(kwargs)), each)
    return found  # type: ignore[no-any-return]  # as the arguments were


def insert(seen: Viewed, describe: Callable[[fx.Node, Any], object]) -> fx.Node:
    """Return a node for the view, inserted at the graph's present insertion point.

    A step that only undoes another view is skipped. describe: called with each new node and its fake value.
    """
    node = seen.node
    for step in seen.steps:
        source = _undone(node, step)
        if source is None:
            source = step.make(node)
            describe(source, through(value_of(node), (step,)))
        node = source
    return node


def _undone(node: fx.Node, step: Step) -> fx.Node | None:
    """Return the input of a view if the step would undo that view, else None."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not step.inverse.is_made(node):
        return None
    before, after = value_of(source), through(value_of(node), (step,))
    known = isinstance(before, FakeTensor) and isinstance(after, FakeTensor)
    return source if known and same_sizes(before.shape, after.shape) else None


def ends(node: fx.Node, steps: Sequence[Step]) -> Iterator[fx.Node]:
    """Yield the nodes of the graph that view this one through the steps; without steps, the node itself."""
    if not steps:
        yield node
        return
    for user in list(node.users):
        if user.args and user.args[0] is node and steps[0].is_made(user):
            yield from ends(user, steps[1:])
