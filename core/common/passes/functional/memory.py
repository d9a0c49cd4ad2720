"""Where the values of a functional graph would lie once its updates run in place, and who reads what they overwrite.

A functional graph gives every update memory of its own. Here a new version of a value is put into the memory of the old
one, version by version in graph order; overlap is decided by bytes, so that disjoint parts of one buffer (query and key
of a joined projection) do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from core.common.passes import Writes, same_size, value_of
from core.common.passes.values.layouts import same_layout

OWNED = ("placeholder", "get_attr")
"""Kinds of nodes whose memory belongs to the caller."""


@dataclass(frozen=True, slots=True)
class Area:
    """The bytes that a strided value covers: where it begins, and (size, stride) of each dimension that moves."""

    offset: Any
    dims: tuple[tuple[Any, Any], ...]
    itemsize: int

    @classmethod
    def of(cls, value: Any) -> Area | None:
        """Return the area of a value in its own storage, None for what is no strided tensor."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        return cls.at(value, value.shape, value.stride(), value.storage_offset())

    @classmethod
    def at(cls, like: Tensor, shape: Any, stride: Any, offset: Any) -> Area:
        """Return the area of a view of these sizes, strides and offset (in elements), of the dtype of `like`."""
        size = like.element_size()
        dims = tuple((n, s * size) for n, s in zip(shape, stride, strict=True) if not (type(n) is int and n == 1))
        return cls(offset * size, dims, size)

    def moved(self, by: Any) -> Area:
        """Return the area so many bytes further on."""
        return replace(self, offset=self.offset + by)

    def is_same(self, other: Area) -> bool:
        """Tell whether both are known to cover the same bytes in the same order."""
        pairs = [(self.offset, other.offset), (self.itemsize, other.itemsize)]
        if len(self.dims) != len(other.dims):
            return False
        for mine, theirs in zip(self.dims, other.dims, strict=True):
            pairs += zip(mine, theirs, strict=True)
        return all(same_size(a, b) for a, b in pairs)

    def is_apart(self, other: Area) -> bool:
        """Tell whether both areas are known to have no byte in common.

        Modulo a stride m, dimensions with strides that are multiples of m vanish, and the others cover an interval.
        Areas whose intervals are disjoint modulo m are disjoint.
        """
        if any(type(n) is int and n == 0 for n, _ in (*self.dims, *other.dims)):
            return True
        moduli = {stride for _, stride in (*self.dims, *other.dims) if type(stride) is int and stride > 0}
        return any(self._interval_apart(other, modulus) for modulus in (0, *moduli))

    def _interval_apart(self, other: Area, modulus: int) -> bool:
        mine, theirs = self._interval(modulus), other._interval(modulus)
        return mine is not None and theirs is not None and (mine[1] <= theirs[0] or theirs[1] <= mine[0])

    def _interval(self, modulus: int) -> tuple[int, int] | None:
        """Return the interval of bytes covered modulo a stride (0: no modulus), None if it is no interval with known
        ends."""
        if type(self.offset) is not int:
            return None
        start = self.offset % modulus if modulus else self.offset
        end = start + self.itemsize
        for size, stride in self.dims:
            if modulus and type(stride) is int and stride % modulus == 0:
                continue
            if type(size) is not int or type(stride) is not int or stride < 0:
                return None
            end += (size - 1) * stride
        return None if modulus and end > modulus else (start, end)

    def covers(self, other: Area) -> bool:
        """Tell whether this area is known to contain every byte of another one.

        Both are read as ranges of indices, one per stride, like the digits of a number. The indices are unique if no
        dimension reaches into the next one's stride.
        """
        if self.is_same(other):
            return True
        strides = [stride for _, stride in (*self.dims, *other.dims)]
        if any(type(stride) is not int or stride <= 0 for stride in strides):  # symbols can't be hashed
            return False
        levels = sorted(set(strides), reverse=True)
        mine, theirs = self._ranges(levels), other._ranges(levels)
        if mine is None or theirs is None or mine[1] != theirs[1] or self.itemsize != other.itemsize:
            return False
        return all(
            (start == inner and same_size(size, length))
            or (type(size) is int and type(length) is int and start <= inner and inner + length <= start + size)
            for (start, size), (inner, length) in zip(mine[0], theirs[0], strict=True)
        )

    def _ranges(self, levels: list[int]) -> tuple[list[tuple[int, Any]], int] | None:
        """Return the first index and the count at each stride, and the bytes that remain; None if not unique."""
        sizes = dict.fromkeys(levels, 1) | {stride: size for size, stride in self.dims}
        if type(self.offset) is not int or len({stride for _, stride in self.dims}) < len(self.dims):
            return None
        found, rest = list[tuple[int, Any]](), self.offset
        for index, stride in enumerate(levels):
            start, rest = divmod(rest, stride)
            size = sizes[stride]
            if index and (levels[index - 1] % stride or type(size) is not int):
                return None
            if index and start + size > levels[index - 1] // stride:
                return None
            found.append((start, size))
        return found, rest


def _same_dims(left: Area, right: Area) -> bool:
    return replace(left, offset=0).is_same(replace(right, offset=0))


class Memory:
    """The storages of a functional graph, joined as updates are put in place.

    writes: the analysis of the graph; meanwhile nodes are moved, but none is added or removed. scatters: nodes that
    return their first argument with one part replaced by the second argument. Each maps to the area of that part in the
    first argument's own storage.
    """

    def __init__(self, writes: Writes, scatters: Mapping[fx.Node, Area]) -> None:
        self._writes = writes
        self._scatters = scatters
        self._places: dict[object, tuple[object, Any]] = {}
        self._members: dict[object, list[object]] = {}
        self._stand_ins: dict[fx.Node, fx.Node] = {}

    def key(self, node: fx.Node) -> object | None:
        """Return the storage of a node's value in the functional graph, None if unknown."""
        keys = self._writes.of(node)
        return next(iter(keys)) if len(keys) == 1 else None

    def root(self, node: fx.Node) -> object | None:
        """Return the representative of the memory that the value will occupy, None if unknown."""
        key = self.key(node)
        return None if key is None else self._place(key)[0]

    def area(self, node: fx.Node, part: Area | None = None) -> Area | None:
        """Return the area that the value, or a part of its storage, occupies in its memory; None if unknown."""
        node = self._stand_ins.get(node, node)
        key, area = self.key(node), part or Area.of(value_of(node))
        return None if key is None or area is None else area.moved(self._place(key)[1])

    def join(self, new: fx.Node, old: fx.Node) -> None:
        """Put a value and its views into the memory of another value of the same layout.

        A value of another layout must have no views: it takes the area of the other value.
        """
        key, root = self.key(new), self.root(old)
        here, there = Area.of(value_of(new)), self.area(old)
        assert key is not None and root is not None and here is not None and there is not None
        if self._place(key)[0] == root:
            return
        if not same_layout(value_of(new), value_of(old)):
            self._stand_ins[new] = old
        assert key not in self._places, "a new version is joined once"
        shift = there.offset - here.offset
        for each in self._members.pop(key, [key]):
            own = self._place(each)[1]
            self._places[each] = (root, own + shift)
            self._members.setdefault(root, [root]).append(each)

    def _place(self, key: object) -> tuple[object, Any]:
        return self._places.get(key, (key, 0))

    def owners(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the inputs and constants of the graph whose memory this is."""
        root = self.root(node)
        return tuple(holder for key in self._keys(root) for holder in self._holders(key) if holder.op in OWNED)

    def holders(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield all values in the memory of this one, as joined so far."""
        for key in self._keys(self.root(node)):
            yield from self._holders(key)

    def lies_in(self, node: fx.Node, root: object | None) -> bool:
        """Tell whether a value lies in this memory, as joined so far."""
        return any(self._place(key)[0] == root for key in self._writes.of(node))

    def _keys(self, root: object | None) -> list[object]:
        return [] if root is None else list(self._members.get(root, (root,)))

    def _holders(self, key: object) -> tuple[fx.Node, ...]:
        return self._writes.holders.get(key, ())

    def readers(self, node: fx.Node, old: fx.Node, area: Area, end: fx.Node | None) -> Iterator[fx.Node]:
        """Yield the nodes that read, after `node` and before `end`, the present content of this area of old's memory.

        A scatter passes its argument on without reading it: the readers of its result are yielded instead, as far as
        they read that area before it is replaced.
        """
        waiting = [(key, self._place(key)[1]) for key in self._keys(self.root(old))]
        # After `end` an input holds the copied value; content that was passed on elsewhere is unchanged.
        ends = {key: end for key, _ in waiting}
        seen: list[tuple[object, Any]] = []
        while waiting:
            key, shift = waiting.pop()
            if any(key == known and same_size(shift, by) for known, by in seen):
                continue
            seen.append((key, shift))
            for holder, user in self._uses(key, node, ends.get(key)):
                where = Area.of(value_of(holder))
                if where is not None and where.moved(shift).is_apart(area):
                    continue
                if user not in self._scatters or where is None:
                    yield user
                    continue
                for handed in self._handed_on(user, holder, where, shift, area):
                    if handed is None:
                        yield user
                    else:
                        waiting.append(handed)

    def _handed_on(
        self, scatter: fx.Node, holder: fx.Node, where: Area, shift: Any, area: Area
    ) -> Iterator[tuple[object, Any] | None]:
        """Yield the place of an argument's area in a scatter's result: the storage, and the shift in bytes.

        Yields nothing if the scatter replaces the area, None if that is unknown.
        """
        part, old, result = self._scatters[scatter], Area.of(value_of(scatter.args[0])), Area.of(value_of(scatter))
        key = self.key(scatter)
        if key is None or old is None or result is None or old.dims != result.dims:
            yield None
            return
        if scatter.args[0] is holder and not (part.moved(shift).covers(area) or part.is_same(where)):
            yield key, where.offset + shift - result.offset
        if scatter.args[1] is holder:
            moved = where.offset + shift - (part.offset - old.offset + result.offset)
            yield (key, moved) if _same_dims(part, where) else None

    def late_readers(self, new: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that use the value, or a view of it, after `end`."""
        for key in self._writes.of(new):
            yield from (user for _, user in self._uses(key, end, None))

    def _uses(self, key: object, after: fx.Node, before: fx.Node | None) -> Iterator[tuple[fx.Node, fx.Node]]:
        for holder in self._holders(key):
            for user in holder.users:
                if user <= after or self._only_views(user, holder):
                    continue
                is_source = user is before and user.args[1] is holder
                if before is None or user < before or is_source:
                    yield holder, user

    def _only_views(self, user: fx.Node, holder: fx.Node) -> bool:
        """Tell whether a node reads no element of the argument: a view, or a query of sizes."""
        if user.op != "call_function" or user in self._writes.written:
            return False
        if getattr(user.target, "__name__", "").startswith("sym_"):
            return True
        value, whole = value_of(user), self._writes.of(user)
        own = getattr(user.target, "namespace", "") in ("aten", "prims") or getattr(user.target, "__name__", "") == (
            "getitem"
        )
        return own and value is not None and bool(whole) and whole <= self._writes.of(holder)
