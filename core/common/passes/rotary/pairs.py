"""Pairs the rotation of a query with that of its key, and moves them together if the model has them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from core.common.passes import PassContext, Writes, view
from core.common.passes.rotary.features import Table
from core.common.passes.rotary.form import Rotation

_REPEATABLE = frozenset(
    {"unsqueeze", "squeeze", "getitem", "slice", "select", "narrow", "cast", "expand", "repeat_interleave", "neg"}
    | {"cat", "stack", "reshape", "view", "flatten", "transpose", "permute", "contiguous"}
)
"""Kinds of nodes that models repeat to prepare the same table for query and key, layer by layer."""
_VIEWS = frozenset({"transpose", "permute", "view", "reshape", "flatten", "unflatten", "unsqueeze", "contiguous"})


def pair_up(context: PassContext, rotations: Sequence[Rotation]) -> list[tuple[Rotation, ...]]:
    """Return the rotations (in order of results) in groups of two, query first, or one.

    Two rotations form a pair if their tables and options are equal and the second's x does not depend on the first's
    result; each takes the next one that fits. Nodes are moved down where needed, and the second rotation gets the
    tables of the first.
    """
    writes: Writes = context.analysis("writes")
    order: Mapping[fx.Node, int] = context.analysis("order")
    keys = [_key(rotation, writes) for rotation in rotations]
    groups: list[tuple[Rotation, ...]] = []
    taken: set[int] = set()
    moved = False
    for index, first in enumerate(rotations):
        if index in taken:
            continue
        partner = next((i for i in range(index + 1, len(rotations)) if i not in taken and keys[i] == keys[index]), None)
        late = None if partner is None else _late_views(first, rotations[partner], order, writes)
        if partner is None or late is None:
            groups.append((first,))
            continue
        second = rotations[partner]
        taken.add(partner)
        _share_tables(first, second)
        if order[second.x] > order[first.result]:
            second.result.prepend(first.result)
            for node in sorted(late, key=order.__getitem__, reverse=True):
                second.result.append(node)
            moved = True
        groups.append((second, first) if _is_smaller(first.x, second.x) else (first, second))
    if moved:
        context.analyses.invalidate()  # type: ignore[union-attr]  # set when the order was computed
    return groups


def _key(rotation: Rotation, writes: Writes) -> tuple[object, ...]:
    tables = tuple(_table_key(table, writes) for table in (rotation.cos, rotation.sin))
    rank = len(view.shape(rotation.x) or ())
    options = (rotation.style, rotation.width, rotation.compute_dtype, rotation.out_dtype, rotation.backward)
    return (*tables, *options, rotation.head_size, rank, view.dtype(rotation.x))


def _table_key(table: Table, writes: Writes) -> object:
    return _same_value(table[0], writes, 6), table[1]


def _same_value(argument: Any, writes: Writes, depth: int) -> object:
    """Return a key that is equal for nodes that compute the same value; nothing may write the tensors that they
    read."""
    if isinstance(argument, (tuple, list)):
        return tuple(_same_value(item, writes, depth) for item in argument)
    if isinstance(argument, slice):
        return (
            "slice",
            *(_same_value(bound, writes, depth) for bound in (argument.start, argument.stop, argument.step)),
        )
    if not isinstance(argument, fx.Node):
        return type(argument), argument
    if depth == 0 or view.kind(argument) not in _REPEATABLE or writes.writers(argument, *argument.all_input_nodes):
        return argument
    options = tuple((name, _same_value(value, writes, depth - 1)) for name, value in sorted(argument.kwargs.items()))
    return (argument.target, *(_same_value(item, writes, depth - 1) for item in argument.args), options)


def _late_views(
    first: Rotation, second: Rotation, order: Mapping[fx.Node, int], writes: Writes
) -> list[fx.Node] | None:
    """Return the views of the first result that must move behind the second, or None where that can't be."""
    limit = order[second.result]
    late: dict[fx.Node, None] = {}
    if order[second.x] < order[first.result]:
        return None if first.x is second.x else []
    pending = [user for user in first.result.users if order[user] < limit]
    if second.x is first.result or writes.writers(first.result):
        return None
    while pending:
        node = pending.pop()
        if node in late:
            continue
        if view.kind(node) not in _VIEWS or node in second.nodes:
            return None
        late[node] = None
        pending += [user for user in node.users if order[user] < limit]
    return list(late)


def _share_tables(first: Rotation, second: Rotation) -> None:
    """Let the second rotation read the first's tables, which are equal and older."""
    for (own, _), (old, _) in ((second.cos, first.cos), (second.sin, first.sin)):
        if own is not old:
            own.replace_all_uses_with(old, delete_user_cb=lambda user: user in second.nodes)


def _is_smaller(left: fx.Node, right: fx.Node) -> bool:
    """Return whether the left tensor has fewer heads: the first size in which they differ, where both are known."""
    sizes = zip(view.shape(left) or (), view.shape(right) or (), strict=False)
    known = ((a, b) for a, b in sizes if isinstance(a, int) and isinstance(b, int) and a != b)
    return next((a < b for a, b in known), False)
