"""The input of a quantisation or a cast behind a norm: the norm, a bias added to it, a flattening of its rows.

Only fused nodes may read the norm's first result; the sum may have any readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from core.common.passes import PassContext, same_sizes, view
from core_npu.passes.calls import called, other_reader, read, result_of, results
from core_npu.passes.conditions import is_row
from core_npu.passes.streams import streams

__all__ = ["ADD_NORM", "NORM", "Normed", "count_owed", "flattens", "normed"]

NORM, ADD_NORM = "npu_rms_norm", "npu_add_rms_norm"
_VIEWS = ("view", "reshape", "flatten")


@dataclass(frozen=True, slots=True)
class Normed:
    """The result of a norm on its way to a reader. steps: the nodes on the way, the call and its result first.

    beta: what was added to it. flat: whether leading dimensions were joined to one. sums: the readers of the sum.
    """

    call: fx.Node
    given: Mapping[str, Any]
    steps: tuple[fx.Node, ...]
    beta: fx.Node | None
    flat: bool
    sums: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        """The name of the norm's op."""
        return called(self.call)

    @property
    def x(self) -> fx.Node:
        """The input of the norm, or the first term of its sum."""
        found: fx.Node = self.given["input" if self.name == NORM else "x1"]
        return found

    @property
    def rank(self) -> int:
        """The rank of the norm's input."""
        return len(view.shape(self.x) or ())


def normed(operand: Any, reader: fx.Node, *names: str) -> Normed | str | None:
    """Return the norm (of these ops) whose result a reader has as operand; why it can't be fused; None for no norm."""
    steps: list[fx.Node] = []
    node = operand
    while isinstance(node, fx.Node) and (following := _step(node, names)) is not None:
        steps.insert(0, node)
        node = following
    call = result_of(node, *names)
    if call is None:
        return None
    steps.insert(0, node)
    reason = _refusal(steps, reader, call)
    if reason:
        return reason
    beta = next((_bias(step, source) for source, step in pairwise(steps) if _adds(step)), None)
    flat = any(view.kind(step) in _VIEWS for step in steps)
    readers = results(call) or {}
    return Normed(call, read(call), (call, *steps), beta, flat, readers.get(2, ()))


def _step(node: fx.Node, names: tuple[str, ...]) -> fx.Node | None:
    """Return the input of a node that is one step (bias, view) after the norm, None for any other node."""
    if view.kind(node) in (*_VIEWS, "cast"):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    for source, _ in view.orders(node) if _adds(node) else ():
        if result_of(source, *names) is not None:
            return source  # type: ignore[no-any-return]
    return None


def _adds(node: fx.Node) -> bool:
    return view.kind(node) == "add"


def _bias(node: fx.Node, source: fx.Node) -> fx.Node | None:
    other = view.other(node, source)
    return other if isinstance(other, fx.Node) else None


def _refusal(steps: list[fx.Node], reader: fx.Node, call: fx.Node) -> str:
    kinds = [view.kind(step) for step in steps[1:]]
    if "cast" in kinds:
        return f"{steps[kinds.index('cast') + 1]} stands between {call} and {reader}"
    if kinds not in ([], ["add"], *([kind] for kind in _VIEWS), *(["add", kind] for kind in _VIEWS)):
        return f"more than a bias and a flattening stand between {call} and {reader}"
    for step, user in zip(steps, (*steps[1:], reader), strict=True):
        reason = other_reader(step, user)
        if reason:
            return reason
    found = results(call)
    if found is None or len(found.get(0, ())) != 1:
        return f"{call} is used otherwise than by its results, each once"
    if found.get(1):
        return f"{found[1][0]} reads the norm's factor"
    for source, step in pairwise(steps):
        if _adds(step) and not is_row(_bias(step, source), source):
            return f"{step} adds no bias of one value per channel"
        if view.kind(step) in _VIEWS and not flattens(step):
            return f"{step} does more than join the leading dimensions of {source}"
    return ""


def flattens(node: fx.Node) -> bool:
    """Return whether a node joins all dimensions of its input but the last, and does nothing else."""
    if view.kind(node) not in _VIEWS or not isinstance(node.args[0], fx.Node):
        return False
    source, result = view.shape(node.args[0]), view.shape(node)
    return bool(source) and result is not None and len(result) == 2 and same_sizes(result[1:], (source or ())[-1:])


def count_owed(
    context: PassContext, follower: str, refused: Callable[[Mapping[str, Any], Mapping[str, Any]], str]
) -> int | None:
    """Count norms of sums whose values one call of `follower` alone reads, without anything between.

    refused: called with the arguments of the norm and of the follower; gives a reason, or nothing. None where a bias, a
    view, a write or a stream makes it a matter of the graph's order and shapes.
    """
    if context.analysis("writes").all_written or streams(context.graph):
        return None
    count = 0
    for norm in (node for node in context.graph.nodes if called(node) == ADD_NORM):
        found = results(norm) or {}
        readers = [user for value in found.get(0, ()) for user in value.users]
        if len(readers) != 1 or found.get(1):
            continue
        if called(readers[0]) != follower:
            return None
        count += not refused(read(norm), read(readers[0]))
    return count
