"""Recognise a rotation: compares what the reader found between a tensor and a result with the op's styles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from core.common.passes import NearMiss, near_miss, same_sizes, value_of, view
from core.common.passes.rotary.features import Column, Features, Table
from core.common.passes.rotary.operations import MOVES, OPERATIONS
from core.common.passes.rotary.reader import Reader

_MAX_STEPS = 32  # how many nodes back from a sum of products x is searched


@dataclass(frozen=True, slots=True)
class Rotation:
    """One rotated tensor: `result` is x rotated by cos and sin; `nodes` are all nodes in between.

    width: the number of rotated features. compute_dtype: None for what promotion gives. out_dtype: None for that of x.
    backward: rotated the other way, as by -sin.
    """

    x: fx.Node
    result: fx.Node
    cos: Table
    sin: Table
    style: str
    width: int
    compute_dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    backward: bool
    nodes: tuple[fx.Node, ...]

    @property
    def head_size(self) -> int:
        """The number of features of x."""
        return view.shape(self.x)[-1]  # type: ignore[index,no-any-return]  # read as a tensor of a known last size

    @property
    def rotary_dim(self) -> int:
        """The width as the op takes it: 0 for all features."""
        return 0 if self.width == self.head_size else self.width


def is_seed(node: fx.Node) -> bool:
    """Return whether a rotation could be computed at this node: a sum of two products, or the end of complex ones."""
    kind = view.kind(node)
    return kind in ("add", "sub", "view_as_real") and len(_products(node)) == (1 if kind == "view_as_real" else 2)


def find_rotation(seed: fx.Node, order: Mapping[fx.Node, int]) -> Rotation | NearMiss | None:
    """Return the largest rotation that holds this sum of products; a near-miss where it looks like one and is none."""
    readers: dict[fx.Node, Reader] = {}
    results = _results(seed)
    reached = [dict.fromkeys(node for each in product.args for node in _sources(each)) for product in _products(seed)]
    if not _may_turn(seed, results, reached):
        return None
    bases = _bases(reached)
    for result in reversed(results):
        # Casts before and after belong to the rotation if they cancel; others stay outside.
        for x in sorted(bases, key=lambda x: view.dtype(x) != view.dtype(result)):
            if _alike(x, result):
                reader = readers.get(x)
                if reader is None:
                    reader = readers[x] = Reader(x, order, OPERATIONS)
                features = reader.read(result)
                found = None if features is None else _recognise(reader, result, features)
                if found is not None:
                    return found
    return _miss(seed, readers)


def _may_turn(seed: fx.Node, results: list[fx.Node], reached: list[dict[fx.Node, None]]) -> bool:
    """Tell quickly whether a sum of two products negates a part, as a rotation does: most do not."""
    kind = view.kind(seed)
    joined = kind == "sub" and any(view.kind(result) in ("cat", "stack") for result in results)
    return kind == "view_as_real" or joined or any(view.kind(node) == "neg" for nodes in reached for node in nodes)


def _products(seed: fx.Node) -> list[fx.Node]:
    """Return the products among a node's operands, casts in between left out."""
    found = []
    for operand in seed.args:
        while (source := view.source_of_cast(operand)) is not None:
            operand = source
        if view.kind(operand) == "mul":
            found.append(operand)
    return found  # type: ignore[return-value]  # what has a kind is a node


def _bases(reached: list[dict[fx.Node, None]]) -> list[fx.Node]:
    """Return the nodes from which all products of a sum are computed, the farthest first."""
    common = [node for node in reversed(reached[0]) if all(node in others for others in reached[1:])]
    # Leave out a cast that changes nothing: it may read another tensor for its dtype.
    same = {view.source_of_cast(node) for node in common if node.args and view.dtype(node) == view.dtype(node.args[0])}
    return [node for node in common if node not in same]


def _sources(operand: object) -> Iterator[fx.Node]:
    """Yield a node and, going back, the nodes that it moves, negates or casts."""
    found: dict[fx.Node, None] = {}
    pending = [operand] if isinstance(operand, fx.Node) else []
    while pending and len(found) < _MAX_STEPS:
        node = pending.pop(0)
        if node not in found:
            found[node] = None
            if view.kind(node) in MOVES:
                pending += node.all_input_nodes
    yield from found


_ENDS = frozenset({"cast", "cat", "stack", "flatten", "reshape", "view", "view_as_real"})


def _results(seed: fx.Node) -> list[fx.Node]:
    """Return the sum and the nodes concatenated from it, nearest first."""
    found = [seed]
    while len(found) < 8:
        users = [user for user in found[-1].users if view.kind(user) in _ENDS]
        if len(users) != 1:
            break
        found += users
    return found


def _alike(x: fx.Node, result: fx.Node) -> bool:
    value, sizes, wanted = value_of(x), view.shape(x), view.shape(result)
    if not isinstance(value, Tensor) or not value.is_floating_point() or not sizes or wanted is None:
        return False
    return x is not result and isinstance(sizes[-1], int) and same_sizes(sizes, wanted)


def _recognise(reader: Reader, result: fx.Node, features: Features) -> Rotation | None:
    x, size = reader.x, features.tail[0]
    wide = features.wide
    if wide is None or len(features.tail) != 1 or features.is_complex:
        return None
    width = size - sum(map(bool, features.columns.get(None, ((), ()))[0]))
    rest = features.columns.get(None, ((0,) * size, ()))[0]
    if rest != (0,) * width + tuple(range(width + 1, size + 1)):
        reader.fail(result, f"{result} does not leave alone all features of {x} from {width} on")
        return None
    columns = _whole_tables({table: column for table, column in features.columns.items() if table is not None})
    if len(columns) != 2:
        reader.fail(result, f"{result} is {x} times {len(columns)} tables, not 2")
        return None
    for cos, sin in (tuple(columns), tuple(columns)[::-1]):
        forms = _forms(width).get((columns[cos][0][:width], columns[sin][0][:width]), ())
        places = (columns[cos][1][:width], columns[sin][1][:width])
        form = next((form for form in forms if places[0] == places[1] and places[0] in form[2]), None)
        if form is None:
            continue
        if not _agree(cos, sin, places[0]):
            reader.fail(result, f"the tables {cos[0]} and {sin[0]} are no two alike, as wide as what is rotated")
            return None
        out = None if features.dtype == reader.dtype else features.dtype
        if out is not None and view.kind(result) == "cast":
            return None  # the cast comes after the rotation: its argument is read next
        if features.rounded and out is not None:
            reader.fail(result, f"{result} is {features.dtype}, rounded to {reader.dtype} and widened again")
            return None
        promoted = {torch.promote_types(reader.dtype, _dtype(table)) for table in (cos, sin)}
        compute = None if promoted == {wide} else wide
        slices = [table[0] for table in features.columns if table is not None and table not in columns]
        nodes = (*slices, *reader.nodes(result))
        return Rotation(x, result, cos, sin, form[0], width, compute, out, form[1], nodes)
    reader.fail(result, f"{result} pairs the features of {x} in another way than rotary embedding")
    return None


def _dtype(table: Table) -> torch.dtype:
    value = value_of(table[0])
    return value.dtype.to_real() if value.dtype.is_complex else value.dtype  # type: ignore[no-any-return]


def _agree(cos: Table, sin: Table, places: tuple[int, ...]) -> bool:
    """Return whether the tables have one shape and one entry per place."""
    sizes = view.shape(cos[0]) or (0,)
    if not all(_dtype(table).is_floating_point for table in (cos, sin)):
        return False
    return same_sizes(sizes, view.shape(sin[0]) or ()) and sizes[-1] == max(places) + 1


_Sources = tuple[int, ...]
_Form = tuple[str, bool, tuple[_Sources, _Sources]]


@lru_cache(maxsize=64)
def _forms(width: int) -> Mapping[tuple[_Sources, _Sources], list[_Form]]:
    """Return by the sources at cos and sin: the styles, whether backward, and the places in wide and in half tables."""
    half = width // 2
    every, pairs = tuple(range(1, width + 1)), range(half)
    first, second = every[:half], every[half:]
    even, odd = every[::2], every[1::2]
    minus = {name: tuple(-i for i in part) for name, part in (("second", second), ("odd", odd))}
    crossed = tuple(s for a, b in zip(even, minus["odd"], strict=False) for s in (b, a))
    tall, wide = tuple(pairs) * 2, tuple(i for i in pairs for _ in (0, 1))
    styles = (
        ("half", every, minus["second"] + first, tall),
        ("interleaved", every, crossed, wide),
        ("deinterleave", even + odd, minus["odd"] + even, tall),
    )
    found: dict[tuple[_Sources, _Sources], list[_Form]] = {}
    for style, aligned, turned, per_pair in styles:
        for backward in (False, True):
            signed = tuple(-s for s in turned) if backward else turned
            found.setdefault((aligned, signed), []).append((style, backward, (tuple(range(width)), per_pair)))
    return found


def _whole_tables(columns: Mapping[Table, Column]) -> Mapping[Table, Column]:
    """Where features are multiplied by slices of tables, combine the columns into those of the whole tables."""
    if len(columns) == 2:
        return columns
    found: dict[Table, Column] = {}
    for (node, part), (sources, places) in columns.items():
        whole, start = _last_slice(node)
        moved = tuple(place + start if source else 0 for source, place in zip(sources, places, strict=True))
        known = found.get((whole, part))
        if known is None:
            found[whole, part] = (sources, moved)
        elif any(a and b for a, b in zip(known[0], sources, strict=True)):
            return columns
        else:
            pairs = (zip(known[0], sources, strict=True), zip(known[1], moved, strict=True))
            found[whole, part] = (tuple(a or b for a, b in pairs[0]), tuple(a or b for a, b in pairs[1]))
    return found


def _last_slice(node: fx.Node) -> tuple[fx.Node, int]:
    """Return (table, start) for `table[..., start:stop]`, for another node itself and 0."""
    value = value_of(node.args[0]) if node.args else None
    if view.kind(node) != "getitem" or not isinstance(value, Tensor) or not isinstance(node.args[0], fx.Node):
        return node, 0
    index: Any = node.args[1]
    last = index[1] if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis else None
    if not isinstance(last, slice) or last.step not in (None, 1) or not isinstance(last.start or 0, int):
        return node, 0
    return node.args[0], range(value.shape[-1])[last].start


def _miss(seed: fx.Node, readers: Mapping[fx.Node, Reader]) -> NearMiss | None:
    """Return the near-miss of a sum with a rotated operand: a half negated and concatenated, or a complex product."""
    if view.kind(seed) == "view_as_real":
        looks = any(view.kind(source) == "view_as_complex" for source in _products(seed)[0].all_input_nodes)
    elif view.kind(seed) == "add":
        looks = any(_is_crossed(operand) for each in _products(seed) for operand in each.all_input_nodes)
    else:
        looks = any(_is_pair(user) for user in seed.users)
    if not looks:
        return None
    reasons = [reason for reader in readers.values() for reason in reader.reasons]
    node, reason = reasons[-1] if reasons else (seed, f"{seed} looks like a rotation, of what it can't be told")
    found = near_miss(seed, reason)
    return NearMiss(site=found.site, reason=found.reason, node=node.name)


def _is_crossed(operand: fx.Node) -> bool:
    """Return whether an operand concatenates a negated part with another one."""
    for node in _sources(operand):
        if view.kind(node) in ("cat", "stack"):
            return any(view.kind(part) == "neg" for part in node.all_input_nodes)
    return False


def _is_pair(user: fx.Node) -> bool:
    parts = user.all_input_nodes
    return (
        view.kind(user) in ("cat", "stack")
        and sorted(map(view.kind, parts)) == ["add", "sub"]
        and all(map(is_seed, parts))
    )
