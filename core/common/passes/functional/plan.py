"""Which updates of a functional graph may run in place: no later node may need the overwritten value.

Updates are judged in graph order. An update that may run in place puts its new version into the memory of the old one,
where later updates find it. Readers of an old value are moved before the update if nothing forbids that, so that a copy
remains only where two versions are needed at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from core.common.passes import is_impure, value_of
from core.common.passes.functional.memory import Area, Memory
from core.common.passes.functional.updates import Updates
from core.common.passes.functional.wrapped import Target, WrappedCall
from core.common.passes.original import node_arguments
from core.common.passes.values.layouts import same_layout

_COPIED = torch.ops.aten.copy.default  # elementwise, though torch does not tag it so


@dataclass(slots=True)
class Plan:
    """What to do with each update."""

    #: The memory of values once the plan is carried out.
    memory: Memory
    #: Calls to unwrap, each with the targets to clone first, by index, and the reasons.
    wrapped: dict[fx.Node, dict[int, str]] = field(default_factory=dict)
    #: For ops that only write: the input into which each result is written.
    buffers: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    #: ATen ops that get their in-place form; True if they copy a value onto itself and are removed.
    in_place: dict[fx.Node, bool] = field(default_factory=dict)
    #: Scatters that become a copy into a view; True if the part is already in place and they are removed.
    scatters: dict[fx.Node, bool] = field(default_factory=dict)
    #: Copies into inputs: True if they copy a value onto itself, False if their source must be copied first.
    closing: dict[fx.Node, bool] = field(default_factory=dict)
    #: Why a copy remains, by node.
    kept: list[tuple[fx.Node, str]] = field(default_factory=list)
    #: How many nodes were moved.
    moved: int = 0


def plan_updates(module: fx.GraphModule, *, move_readers: bool = True) -> Plan:
    """Judge every update of a graph; nodes may be moved if move_readers, nothing else is changed."""
    planner = _Planner(module, Updates(module), move_readers=move_readers)
    planner.run()
    return planner.plan


class _Planner:
    """One walk over the updates."""

    def __init__(self, module: fx.GraphModule, found: Updates, *, move_readers: bool) -> None:
        self._graph, self._found, self._move_readers = module.graph, found, move_readers
        self.plan = Plan(Memory(found.writes, found.scatters))
        self._memory = self.plan.memory
        self._fixed = {*found.calls, *found.functional, *found.scatters}

    def run(self) -> None:
        """Judge all updates in order."""
        found = self._found
        for node in list(self._graph.nodes):
            if node in found.calls:
                self._wrapped(node, found.calls[node])
            elif node in found.functional:
                self._functional(node)
            elif node in found.scatters:
                self._scatter(node, found.scatters[node])
        for node in found.closing:
            self._close(node)

    def _wrapped(self, node: fx.Node, call: WrappedCall | str) -> None:
        if isinstance(call, str):
            self.plan.kept.append((node, call))
            return
        clones: dict[int, str] = {}
        taken: list[tuple[object, Area]] = []
        others = node_arguments((), call.plain)
        for target in call.targets:
            if call.buffers:
                self._buffer(node, target)
                continue
            reason = self._refusal(node, target, others, taken)
            if reason:
                clones[target.index] = reason
                self.plan.kept.append((node, reason))
                continue
            assert target.old is not None
            areas = (self._memory.area(target.old, part) for part in target.parts)
            taken += [(self._memory.root(target.old), area) for area in areas if area is not None]
            self._join(target)
        self.plan.wrapped[node] = clones

    def _join(self, target: Target) -> None:
        if target.new is not None and target.old is not None:
            self._memory.join(target.new, target.old)

    def _buffer(self, node: fx.Node, target: Target) -> None:
        """Let an op that only writes write directly into the input that its result is copied to."""
        closing = [n for n in self._found.closing if target.new is not None and n.args[1] is target.new]
        for copy in closing:
            owner: Any = copy.args[0]
            area = Area.of(value_of(owner))
            into = Target(old=owner, new=target.new, parts=() if area is None else (area,), index=target.index)
            if not self._refusal(node, into, node.all_input_nodes, ()):
                self._join(into)
                self.plan.buffers[node, target.index] = owner
                return

    def _functional(self, node: fx.Node) -> None:
        old: Any = node.args[0]
        area = Area.of(value_of(old)) if isinstance(old, fx.Node) else None
        if area is None:
            return
        target = Target(old=old, new=node, parts=(area,), index=0)
        read = node_arguments(node.args[1:], node.kwargs)
        others = [each for each in read if not self._elementwise(node, each, old)]
        reason = self._refusal(node, target, others, ())
        if reason:
            self.plan.kept.append((node, reason))
        else:
            self.plan.in_place[node] = (
                node.target is _COPIED and not others and self._memory.lies_in(read[0], self._memory.root(old))
            )
            self._join(target)

    def _elementwise(self, node: fx.Node, other: fx.Node, old: fx.Node) -> bool:
        """Tell whether the node reads each element of `other` just where it writes it, as in `x *= x`."""
        pointwise = node.target is _COPIED or torch.Tag.pointwise in getattr(node.target, "tags", ())
        mine, theirs = self._memory.area(old), self._memory.area(other)
        return pointwise and mine is not None and theirs is not None and mine.is_same(theirs)

    def _scatter(self, node: fx.Node, part: Area) -> None:
        memory = self._memory
        old: Any = node.args[0]
        source: Any = node.args[1]
        there, here = memory.area(old, part), memory.area(source)
        shared = memory.root(source) is not None and memory.root(source) == memory.root(old)
        is_there = shared and here is not None and there is not None and here.is_same(there)
        target = Target(old=old, new=node, parts=(part,), index=0)
        others = () if is_there else (source,)
        reason = self._refusal(node, target, others, (), written=not is_there)
        if reason:
            self.plan.kept.append((node, reason))
        else:
            self.plan.scatters[node] = is_there
            self._join(target)

    def _close(self, node: fx.Node) -> None:
        memory = self._memory
        owner: Any = node.args[0]
        value: Any = node.args[1]
        if memory.root(value) is None or memory.root(value) != memory.root(owner):
            return
        here, there = memory.area(value), memory.area(owner)
        if here is None or there is None or not here.is_apart(there):
            self.plan.closing[node] = here is not None and there is not None and here.is_same(there)

    def _refusal(
        self,
        node: fx.Node,
        target: Target,
        others: Iterable[fx.Node],
        taken: Collection[tuple[object, Area]],
        *,
        written: bool = True,
    ) -> str:
        """Return why the update may not run in place, or ""; may move readers before it.

        others: what the update reads besides. taken: areas that it writes through other arguments. written: False if
        the written part is already in place.
        """
        memory, old = self._memory, target.old
        if old is None or memory.root(old) is None or memory.area(old) is None:
            return "where the old value lies in memory is not known"
        if target.new is not None and not self._fits(target.new, old):
            return f"{target.new.name} lies otherwise in memory than {old.name}"
        for part in target.parts:
            area = memory.area(old, part)
            assert area is not None
            end, reason = self._end(node, old, area)
            reason = reason or self._overlaps(old, area, others, taken)
            reason = reason or (self._needed(node, old, area, end) if written else "")
            reason = reason or ("" if target.new is None or end is None else self._outlives(target.new, end))
            if reason:
                return reason
        return ""

    def _fits(self, new: fx.Node, old: fx.Node) -> bool:
        """Tell whether a new version can replace the old one in memory: no user relies on the new version's own
        layout."""
        mine, theirs = value_of(new), value_of(old)
        if same_layout(mine, theirs):
            return True
        alike = same_layout(mine, theirs, strides=False)
        return alike and all(self._only_copies(user, new) for user in new.users)

    def _only_copies(self, user: fx.Node, source: fx.Node) -> bool:
        is_scatter = user in self._found.scatters and user.args[0] is not source
        return is_scatter or (user in self._found.closing and user.args[0] is not source)

    def _end(self, node: fx.Node, old: fx.Node, area: Area) -> tuple[fx.Node | None, str]:
        """Return the copy into the graph's input after which the memory holds the value for the caller.

        None if the memory belongs to no input. An input without such a copy must keep its value.
        """
        memory = self._memory
        places = [(owner, memory.area(owner)) for owner in memory.owners(old)]
        owners = [(owner, place) for owner, place in places if place is None or not place.is_apart(area)]
        if not owners:
            return None, ""
        names = dict.fromkeys(owner for owner, _ in owners)
        closing = [each for each in self._found.closing if each.args[0] in names and each > node]
        if not closing:
            return None, f"{owners[0][0].name} is given to the graph, which leaves its value as it is"
        owner: Any = closing[0].args[0]
        whole = memory.area(owner)
        several = len(closing) > 1 or (len(names) > 1 and not (whole is not None and whole.is_same(area)))
        return closing[0], f"{owners[0][0].name} is written in several places" if several else ""

    def _overlaps(
        self, old: fx.Node, area: Area, others: Iterable[fx.Node], taken: Collection[tuple[object, Area]]
    ) -> str:
        memory, root = self._memory, self._memory.root(old)
        for root_taken, area_taken in taken:
            if root_taken == root and not area_taken.is_apart(area):
                return f"another argument writes into the memory of {old.name}"
        for other in others:
            if memory.lies_in(other, root) and not ((there := memory.area(other)) and there.is_apart(area)):
                return f"it reads the old value of {old.name} as {other.name}"
        return ""

    def _needed(self, node: fx.Node, old: fx.Node, area: Area, end: fx.Node | None) -> str:
        """Return the readers of the old value after the update that can't be moved before it, "" if there are none."""
        readers = dict.fromkeys(self._memory.readers(node, old, area, end))
        moving: set[fx.Node] = set()
        for reader in readers:
            if not self._move_readers or not self._movable(reader, node, moving):
                return f"{reader.name} needs the old value of {old.name} afterwards"
        for each in [n for n in self._graph.nodes if n in moving]:
            node.prepend(each)
        self.plan.moved += len(moving)
        return ""

    def _movable(self, reader: fx.Node, before: fx.Node, moving: set[fx.Node]) -> bool:
        """Collect the nodes to move so that the reader comes before a node; tell whether that is possible."""
        waiting = [reader]
        while waiting:
            node = waiting.pop()
            if node in moving or node < before:
                continue
            fixed = node is before or node in self._fixed or node.op != "call_function" or is_impure(node)
            if fixed or self._written_between(before, node):
                return False
            moving.add(node)
            waiting += node.all_input_nodes
        return True

    def _written_between(self, first: fx.Node, last: fx.Node) -> bool:
        read = self._found.writes.of(*last.all_input_nodes)
        return any(first < writer < last and into & read for writer, into in self._found.writes.written.items())

    def _outlives(self, new: fx.Node, end: fx.Node) -> str:
        """Return the nodes that use or return a version of an input's value after the input got a newer one, "" if
        none."""
        memory = self._memory
        owner, value = end.args[:2]
        is_final = isinstance(value, fx.Node) and memory.key(value) == memory.key(new)
        for user in memory.late_readers(new, end):
            if user.op == "output":
                return f"{new.name} is returned apart from {owner}"
            if not is_final:
                return f"{user.name} needs {new.name} after {owner} was written"
        return ""
