"""Lay out columns of one tensor anew in one launch, where a model does it by several copies.

A product's rows may hold the columns of several heads in turn, each with its query, key, value and gate (Qwen3-Next).
A model takes them apart by views; `reshape` has to copy each part, and `cat` copies them once more. Which columns a
part shows is read off the strides of its value, so the ways to write views do not matter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, fx

from core.common.passes import (
    LIFTS,
    NearMiss,
    Pass,
    PassContext,
    Site,
    Writes,
    near_miss,
    same_sizes,
    value_of,
    view,
)
from core.common.passes.values.layouts import in_order
from core_cuda.ops.gather_columns import MAX_BLOCKS, MAX_RESULTS, Block, gather_columns, why_not
from core_cuda.passes.columns import Columns, Rows, blocks_of, columns_in, fresh_rows, rows_of
from core_cuda.passes.examples.columns import gathered_columns

_COPYING = frozenset({"reshape", "flatten", "contiguous", "clone", "cat"})


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the copies of the columns of one tensor, of which this is the first; a near-miss where they must stay."""
    writes: Writes = context.analysis("writes")
    if node in context.taken or not _is_copy(node, writes):
        return None
    miss: NearMiss | None = None
    for memory in dict.fromkeys(memory for part in _parts(node) for memory in writes.of(part)):
        found = _of_memory(context, memory)
        if isinstance(found, Site):
            return found
        miss = miss or found
    return miss


def _of_memory(context: PassContext, memory: object) -> Site | NearMiss | None:
    copies = _copies(context, memory)
    if len(copies) < 2:
        return None
    order: Mapping[fx.Node, int] = context.analysis("order")
    best: _Group | None = None
    for base in context.analysis("writes").holders[memory]:
        value = value_of(base)
        if order[base] >= order[copies[0]] or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        group = _Group(context, base, copies)
        if best is None or group.saved > best.saved:
            best = group
        if len(best.gathered) == len(copies) or len(best.results) == MAX_RESULTS:
            break  # no other can do more
    if best is None or not best.looks_like_it:
        return None
    context.taken.update(best.copies if best.reason else best.gathered)
    return near_miss(copies[0], best.reason) if best.reason else best.site()


def _copies(context: PassContext, memory: object) -> tuple[fx.Node, ...]:
    """Return the nodes that copy from this memory, and from such copies, in graph order; none of another site."""
    writes: Writes = context.analysis("writes")
    found: dict[fx.Node, None] = {}
    waiting = [memory]
    for each in waiting:  # which grows
        for user in (user for holder in writes.holders.get(each, ()) for user in holder.users):
            if user not in found and user not in context.taken and _is_copy(user, writes):
                found[user] = None
                waiting += writes.of(user)
    return tuple(sorted(found, key=context.analysis("order").__getitem__))


def _is_copy(node: fx.Node, writes: Writes) -> bool:
    """Tell whether a node writes what it reads to memory of its own, in the order of its shape."""
    if (kind := view.kind(node)) not in _COPYING:
        return False
    value, parts = value_of(node), _parts(node)
    if not isinstance(value, Tensor) or not parts or not in_order(value):
        return False
    last = kind != "cat" or view.operand(node, 1, "dim", 0) in (-1, value.dim() - 1)
    alike = all(view.dtype(part) == value.dtype for part in parts)
    return last and alike and not writes.of(node) & writes.of(*parts)


def _parts(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return what a node copies; nothing where these are no nodes."""
    is_cat = view.kind(node) == "cat"
    given = view.operand(node, 0, "tensors" if is_cat else "self")
    given = view.operand(node, 0, "input") if given is None else given
    parts = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    return parts if all(isinstance(each, fx.Node) for each in parts) else ()


@dataclass(slots=True)
class _Group:
    """The copies of one memory, as far as they are columns of `base`."""

    context: PassContext
    base: fx.Node
    copies: tuple[fx.Node, ...]
    #: which columns each copy is made of, in the shape that it has for each row
    columns: dict[fx.Node, Columns] = field(default_factory=dict)
    blocks: dict[fx.Node, tuple[Block, ...]] = field(default_factory=dict)
    results: tuple[fx.Node, ...] = ()
    #: copies that only other copies read
    inner: tuple[fx.Node, ...] = ()
    #: why copies had to be left out, by copy
    refused: dict[fx.Node, str] = field(default_factory=dict)
    own_reason: str = ""

    def __post_init__(self) -> None:
        self.own_reason = self._why_not()
        if self.own_reason:
            return
        rows, made = rows_of(value_of(self.base)), dict[object, fx.Node]()
        for copy in self.copies:
            parts = [self._columns(part, rows, made) for part in _parts(copy)]
            known = [part for part in parts if part is not None]
            if reason := self._refusal(copy, parts):
                self.refused[copy] = reason
            elif len(known) == len(parts) and (len(parts) == 1 or all(part.ndim for part in known)):
                self.columns[copy] = np.concatenate(known, -1) if len(known) > 1 else known[0]
                made |= dict.fromkeys(self.writes.of(copy), copy)
        self._choose()

    @property
    def writes(self) -> Writes:
        found: Writes = self.context.analysis("writes")
        return found

    @property
    def gathered(self) -> tuple[fx.Node, ...]:
        return (*self.results, *self.inner)

    @property
    def saved(self) -> int:
        """How many launches fewer there are."""
        return max(len(self.gathered) - 1, 0)

    @property
    def reason(self) -> str:
        """Why nothing is gathered, or ""."""
        return "" if self.saved else self.own_reason or next(iter(self.refused.values()), "")

    @property
    def looks_like_it(self) -> bool:
        return bool(self.saved or self.own_reason or (self.refused and len(self.columns) + len(self.refused) > 1))

    def _why_not(self) -> str:
        """Return why the base can't be one, or ""."""
        value, order = value_of(self.base), self.context.analysis("order")
        if reason := why_not(value):
            return f"{self.base}: {reason}"
        if not (value.shape[-1] == 1 or value.stride(-1) == 1) or len(rows_of(value).levels) > 2:
            return f"the rows of {self.base} lie apart"
        late = [each for each in self.writes.writers(self.base) if order[each] > order[self.copies[0]]]
        return f"{late[0]} writes into {self.base} after {self.copies[0]}" if late else ""

    def _columns(self, part: fx.Node, rows: Rows, made: Mapping[object, fx.Node]) -> Columns | None:
        memory, value = self.writes.of(part), value_of(part)
        if view.dtype(part) != view.dtype(self.base):
            return None  # strides count in other units
        if memory == self.writes.of(self.base):
            return columns_in(value, rows)
        copy = next((made[each] for each in memory if each in made), None)
        if copy is None:
            return None
        known = self.columns[copy].ravel()
        found = columns_in(value, fresh_rows(value_of(self.base), known.size))
        return None if found is None else known[found]

    def _refusal(self, copy: fx.Node, parts: list[Columns | None]) -> str:
        """Return why a copy of columns must stay, or ""; parts: the columns of each, None where it has none."""
        known = [part for part in parts if part is not None]
        if not known:
            return ""
        if writers := self.writes.writers(copy):
            return f"{writers[0]} writes into {copy}"
        if len(known) < len(parts):
            other = next(each for each, part in zip(_parts(copy), parts, strict=True) if part is None)
            return f"{copy} also reads {other}, which is not made of columns of {self.base}" if len(known) > 1 else ""
        return ""

    def _choose(self) -> None:
        """Find what must be made, as what is read by others than copies; the copies between are left out then."""
        fitting = dict.fromkeys(self.columns)
        while True:
            read = [copy for copy in fitting if any(user not in fitting for user in self._readers(copy))]
            bad = [copy for copy in read if not self._fits(copy)]
            if not bad:
                break
            for copy in bad:
                del fitting[copy]
        self.results = tuple(read[:MAX_RESULTS])
        gathered = dict.fromkeys(self.results)
        for copy in reversed(fitting):
            readers = self._readers(copy)
            if copy not in read and readers and all(user in gathered for user in readers):
                gathered[copy] = None
        self.inner = tuple(gathered)[len(self.results) :]

    def _fits(self, copy: fx.Node) -> bool:
        self.blocks[copy] = blocks_of(self.columns[copy], MAX_BLOCKS)
        if not self.blocks[copy]:
            self.refused[copy] = f"{copy} is made of more than {MAX_BLOCKS} blocks of columns of {self.base}"
        return bool(self.blocks[copy]) and _way_to(value_of(copy), value_of(self.base)) is not None

    def _readers(self, copy: fx.Node) -> list[fx.Node]:
        """Return who reads a copy, through whatever view."""
        memory = self.writes.of(copy)
        holders = (holder for each in memory for holder in self.writes.holders[each])
        return [user for holder in holders for user in holder.users if not self.writes.of(user) & memory]

    def site(self) -> Site:
        """Return the site; results are made where the first of them was."""
        base = value_of(self.base)
        ways = tuple(_way_to(value_of(each), base) for each in self.results)
        return Site(
            anchor=self.results[0],
            target=_gathering(tuple(self.blocks[each] for each in self.results), ways),
            args=(self.base,),
            interior=tuple(self._interior()),
            outputs=self.results,
        )

    def _interior(self) -> Iterator[fx.Node]:
        """Yield the copies, and the views on the way to them from the base."""
        order: Mapping[fx.Node, int] = self.context.analysis("order")
        memories = self.writes.of(self.base, *self.gathered)
        seen, waiting = set[fx.Node](), list(self.results)
        while waiting:
            node = waiting.pop()
            is_call = node.op.startswith("call_") and node not in self.writes.written
            if node in seen or order[node] <= order[self.base] or not is_call or not self.writes.of(node) & memories:
                continue
            seen.add(node)
            yield node
            waiting += node.all_input_nodes


_Way = tuple[str, tuple[int, ...]]
"""A method and sizes, which give a result the shape that it had; "" where it has it."""


def _way_to(value: Tensor, base: Tensor) -> _Way | None:
    """Return the way from (..., M), rows of base, to the shape of a copy; None where two sizes are unknown."""
    lead = base.dim() - 1
    own = tuple(value.shape[lead:])
    if value.dim() > lead and same_sizes(value.shape[:lead], base.shape[:-1]) and all(type(n) is int for n in own):
        return ("unflatten", own) if len(own) > 1 else ("", ())
    sizes = tuple(size if type(size) is int else -1 for size in value.shape)
    return ("reshape", sizes) if sizes.count(-1) < 2 and 0 not in sizes else None


@lru_cache(maxsize=256)
def _gathering(blocks: tuple[tuple[Block, ...], ...], ways: tuple[_Way, ...]) -> fx.GraphModule:
    """Return a graph of one call, which sites that are alike share, and of views of its results."""
    graph = fx.Graph()
    base = graph.placeholder("base")
    flat = [number for each in blocks for block in each for number in block]
    call = graph.call_function(gather_columns, (base, flat, [len(each) for each in blocks]))
    results = []
    for index, (method, sizes) in enumerate(ways):
        result = graph.call_function(operator.getitem, (call, index))
        if method:
            result = graph.call_method(method, (result, *((-1, sizes) if method == "unflatten" else sizes)))
        results.append(result)
    graph.output(tuple(results) if len(results) > 1 else results[0])
    return fx.GraphModule(torch.nn.Module(), graph)


GATHER_COLUMNS = Pass(
    name="gather_columns",
    does="Lay out columns of one tensor anew in one launch, where several copies did.",
    find=find,
    owner="core_cuda",
    after=(
        "eliminate_common_subexpressions",
        "merge_linears",
        "remove_no_ops",
        "fuse_gated_norm",
        "fuse_delta_gates",
        *LIFTS,
    ),
    examples=gathered_columns,
)
