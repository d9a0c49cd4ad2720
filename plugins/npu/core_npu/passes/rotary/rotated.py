"""Reading a rotated query or key back to the projection that it is a part of: views, rotation, norm, split.

All nodes on the way keep the elements in order: tokens, heads, features. What is read here is one part of one split of
a projection (T, (N + 2 K) D), normed per head by `npu_rms_norm` and rotated by `npu_rotary_mul` or
`npu_apply_rotary_pos_emb`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from core.common.passes import view
from core_npu.passes.calls import called, other_reader, read, result_of
from core_npu.passes.norm.normed import NORM

__all__ = ["Part", "Rotated", "others", "part_of", "rotated", "unviewed"]

_VIEWS = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous")
_SPLITS = ("split", "split_with_sizes")
_TURNS = ("npu_rotary_mul", "npu_apply_rotary_pos_emb")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a split along the last dimension of two. node: what reads it off the split."""

    node: fx.Node
    split: fx.Node
    index: int

    @property
    def source(self) -> fx.Node:
        """The tensor that is split."""
        source = self.split.args[0]
        assert isinstance(source, fx.Node)
        return source

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The sizes of the parts."""
        sizes = view.operand(self.split, 1, "split_size_or_sections", view.operand(self.split, 1, "split_size"))
        return tuple(sizes) if isinstance(sizes, (list, tuple)) else ()


@dataclass(frozen=True, slots=True)
class Rotated:
    """A normed and rotated part. result: the node of it; turn: the rotation; steps: all nodes from the part on."""

    result: fx.Node
    turn: fx.Node
    norm: fx.Node
    part: Part
    cos: Any
    sin: Any
    mode: str
    steps: tuple[fx.Node, ...]

    @property
    def norm_input(self) -> fx.Node:
        """What the norm reads."""
        source: fx.Node = self.given["input"]
        return source

    @property
    def turned(self) -> fx.Node:
        """What the rotation reads."""
        _, source = _turn(self.result)
        assert isinstance(source, fx.Node)
        return source

    @property
    def given(self) -> Any:
        """The arguments of the norm."""
        return read(self.norm)


def rotated(result: Any) -> Rotated | None:
    """Return how a node came out of a split, a norm and a rotation, or None where it did not."""
    turn, turned = _turn(result)
    if turn is None:
        return None
    source, after = unviewed(turned)
    norm = result_of(source, NORM)
    if norm is None:
        return None
    value, before = unviewed(read(norm)["input"])
    part = part_of(value)
    if part is None:
        return None
    given = read(turn)
    first, second = ("r1", "r2") if called(turn) == _TURNS[0] else ("cos", "sin")
    inside = () if turn is result else (turn,)
    steps = (part.node, *before, norm, source, *after, *inside, result)
    return Rotated(result, turn, norm, part, given[first], given[second], str(given["rotary_mode"]), steps)


def _turn(result: Any) -> tuple[fx.Node | None, Any]:
    """Return the rotation whose result a node is, and what it rotates."""
    if called(result) == _TURNS[0]:
        given = read(result)
        return (result, given["input"]) if given["rotate"] is None else (None, None)
    for index, name in enumerate(("query", "key")):
        turn = result_of(result, _TURNS[1], index=index)
        if turn is not None:
            return turn, read(turn)[name]
    return None, None


def unviewed(node: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """Return the source of a chain of views, and the views in order."""
    views: list[fx.Node] = []
    while view.kind(node) in _VIEWS:
        views.insert(0, node)
        node = node.args[0]
    return node, tuple(views)


def part_of(node: Any) -> Part | None:
    """Return the part of a split that a node reads, or None."""
    if view.kind(node) != "getitem" or view.kind(node.args[0]) not in _SPLITS or not isinstance(node.args[1], int):
        return None
    split = node.args[0]
    rank = len(view.shape(split.args[0]) or ())
    dim = view.operand(split, 2, "dim", 0)
    return Part(node, split, node.args[1]) if rank == 2 and dim in (-1, 1) else None


def others(steps: tuple[fx.Node, ...], known: tuple[fx.Node, ...]) -> Iterator[str]:
    """Yield other readers of the steps than the next step, except those in `known`."""
    for step, user in pairwise(steps):
        if step not in known:
            yield other_reader(step, user)
