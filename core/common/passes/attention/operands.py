"""What attention reads: query, key and value behind casts, transpositions and the repetition of key/value heads."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from core.common.passes import same_sizes, view


@dataclass(slots=True)
class Operand:
    """A tensor as the op will take it: `node`, and methods still to be called on it (name, arguments).

    swapped: the last two dimensions of `node` are swapped. flat: batch and heads were one dimension. scale: the number
    that the tensor was multiplied by. nodes: the nodes that were skipped.
    """

    node: fx.Node
    swapped: bool = False
    flat: bool = False
    scale: float = 1.0
    nodes: tuple[fx.Node, ...] = ()
    steps: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def then(self, method: str, *args: Any) -> None:
        """Note a method to call on the tensor that the op takes."""
        self.steps.append((method, args))

    def behind(self, source: Any, *nodes: fx.Node, **changes: Any) -> Operand:
        """Return the operand one step further back, at the input of these nodes."""
        return replace(self, node=source, nodes=(*self.nodes, *nodes), **changes)


Reach = Callable[[fx.Node], bool]
"""Whether the op may replace a node."""


def peel(
    node: fx.Node, reach: Reach, *, repeats: bool = True, scales: bool = False, transposes: bool = False
) -> Operand:
    """Go back from a product's operand (…, a, b) to attention's query, key or value, as far as `reach` allows.

    Skips on the way: the repetition of heads (repeats), a multiplication by a number (scales), a swap of the last
    dimensions (transposes).
    """
    steps: list[Callable[[Operand], Operand | None]] = [_uncast, _unflattened]
    steps += [_untransposed] * transposes + [_unrepeated] * repeats + [_unscaled] * scales
    found = Operand(node)
    while True:
        further = next((further for step in steps if (further := step(found)) is not None), None)
        if further is None or not all(map(reach, further.nodes[len(found.nodes) :])):
            return found
        found = further


def _uncast(found: Operand) -> Operand | None:
    node = found.node
    if is_copy(node):
        return found.behind(node.args[0], node)
    source = view.source_of_cast(node)
    # The op computes in fp32: a cast to fp32 adds nothing, one to fp64 does.
    if source is None or not view.is_exact(view.dtype(source), view.dtype(node)) or view.dtype(node) == torch.float64:
        return None
    return found.behind(source, node)


def is_copy(node: fx.Node) -> bool:
    """Tell whether a node holds the same elements in the same shape, perhaps elsewhere in memory."""
    kind = view.kind(node)
    return kind in ("contiguous", "clone") or (kind == "expand" and view.same_shape(node, node.args[0]))


def _untransposed(found: Operand) -> Operand | None:
    source = transposed(found.node)
    return None if source is None else found.behind(source, found.node, swapped=not found.swapped)


def transposed(node: fx.Node) -> fx.Node | None:
    """Return x if the node is x with its last two dimensions swapped, however spelled."""
    sizes = view.shape(node)
    source: Any = node.args[0] if node.args else None
    if sizes is None or len(sizes) < 2 or not isinstance(source, fx.Node):
        return None
    rank, kind = len(sizes), view.kind(node)
    if kind in ("transpose", "swapaxes"):
        return source if {*(view.swapped_dims(node) or ())} == {rank - 2, rank - 1} else None
    if kind == "permute":
        return source if permutation(node) == (*range(rank - 2), rank - 1, rank - 2) else None
    return source if node.target is builtins.getattr and node.args[1] == "mT" else None


def permutation(node: fx.Node) -> tuple[int, ...]:
    """Return the dimensions that a `permute` names, counted from the front."""
    dims: Any = node.args[1:] or (node.kwargs.get("dims", ()),)
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    return tuple(dim % len(dims) for dim in dims if isinstance(dim, int))


def _unflattened(found: Operand) -> Operand | None:
    """Undo (B, H, a, b) -> (B * H, a, b)."""
    node = found.node
    source: Any = node.args[0] if view.kind(node) in ("reshape", "view", "flatten") else None
    before, after = view.shape(source), view.shape(node)
    if before is None or after is None or len(before) != 4 or len(after) != 3:
        return None
    return found.behind(source, node, flat=True) if same_sizes(before[2:], after[1:]) else None


def _unscaled(found: Operand) -> Operand | None:
    scaled = times_number(found.node) if view.only_user(found.node) is not None else None
    return None if scaled is None else found.behind(scaled[0], found.node, scale=found.scale * scaled[1])


def times_number(node: fx.Node, kind: str = "") -> tuple[fx.Node, float] | None:
    """Return (x, number) if the node multiplies or divides x by a number. kind: what the node computes, where the
    caller knows."""
    kind = kind or view.kind(node)
    if kind == "div" and len(node.args) == 2 and not node.kwargs:
        divided, number = node.args
        if isinstance(divided, fx.Node) and isinstance(number, (int, float)) and number:
            return divided, 1.0 / number
    return view.times_number(node, kind)


def _unrepeated(found: Operand) -> Operand | None:
    """Undo the repetition of each head of (B, K, a, b), in the order in which attention pairs heads."""
    for undo in (_unexpanded, _uninterleaved, _unbroadcast):
        source, nodes = undo(found.node)
        if source is not None:
            return found.behind(source, *nodes)
    return None


_RESHAPES = ("reshape", "view", "flatten", "contiguous", "clone")
_Undone = tuple[fx.Node | None, tuple[fx.Node, ...]]
_NOTHING: _Undone = (None, ())


def _unexpanded(node: fx.Node) -> _Undone:
    """Undo x[:, :, None].expand(B, K, G, a, b).reshape(B, K * G, a, b)."""
    nodes: list[fx.Node] = []
    expanded: Any = node
    while view.kind(expanded) in _RESHAPES and len(nodes) < 3:
        nodes.append(expanded)
        expanded = expanded.args[0]
    single: Any = expanded.args[0] if nodes and view.kind(expanded) == "expand" else None
    whole = view.kind(single) == "getitem" and _only_slices(single.args[1])
    if not whole and view.kind(single) not in ("unsqueeze", *_RESHAPES):
        return _NOTHING
    source: Any = single.args[0]
    before, middle, wide, after = (view.shape(each) for each in (source, single, expanded, node))
    if before is None or middle is None or wide is None or after is None:
        return _NOTHING
    if [len(sizes) for sizes in (before, middle, wide, after)] != [4, 5, 5, 4]:
        return _NOTHING
    alone = same_sizes(middle, (*before[:2], 1, *before[2:]))
    spread = same_sizes((*wide[:2], *wide[3:]), before)
    joined = alone and spread and same_sizes(after, (before[0], before[1] * wide[2], *before[2:]))
    return (source, (*nodes, expanded, single)) if joined else _NOTHING


def _only_slices(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, slice) for part in parts)


def _uninterleaved(node: fx.Node) -> _Undone:
    """Undo x.repeat_interleave(G, dim=1)."""
    if view.kind(node) != "repeat_interleave" or view.operand(node, 2, "dim") not in (1, -3):
        return _NOTHING
    source: Any = node.args[0]
    fits = len(view.shape(source) or ()) == 4 and isinstance(view.operand(node, 1, "repeats"), int)
    return (source, (node,)) if fits else _NOTHING


def _unbroadcast(node: fx.Node) -> _Undone:
    """Undo x.expand(B, H, a, b) or x.repeat(1, H, 1, 1) of a single head."""
    source: Any = node.args[0] if view.kind(node) in ("expand", "expand_as", "repeat") else None
    before, after = view.shape(source), view.shape(node)
    if before is None or after is None or len(before) != 4 or len(after) != 4 or before[1] != 1:
        return _NOTHING
    return (source, (node,)) if same_sizes((before[0], *before[2:]), (after[0], *after[2:])) else _NOTHING
