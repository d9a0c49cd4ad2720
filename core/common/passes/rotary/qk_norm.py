"""Fuse the norms of query and key with the rotary embedding after them to `core::qk_norm_rotary`.

Runs after `lift_rms_norm` and `lift_rotary` and changes no bit. Models norm each head before they put the heads first,
so transpositions stand between norm and rotation; rows are normed alike either way, so they go in front of the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from core.common.ops.canonical import QK_NORM_ROTARY, RMS_NORM, ROTARY
from core.common.passes import NearMiss, Pass, PassContext, PassResult, Site, apply_sites, describe, near_miss, view
from core.common.passes.metadata import fake_values


@dataclass(frozen=True, slots=True)
class _Normed:
    """A normed query or key: the norm, and the transpositions between it and the rotation, in order."""

    norm: fx.Node
    moves: tuple[fx.Node, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The norm's arguments besides x, by name, defaults filled in."""
        return {
            name: value for name, value in RMS_NORM.bind(self.norm.args, self.norm.kwargs).args.items() if name != "x"
        }


def find(node: fx.Node) -> tuple[fx.Node, _Normed, _Normed] | NearMiss | None:
    """Return the rotation of a normed query and key with the two norms; a near-miss where they do not go together."""
    if node.target is not ROTARY.overload:
        return None
    query, key = _normed(node.args[0], node), _normed(node.args[1], node)
    if isinstance(query, str) or isinstance(key, str):
        return near_miss(node, query if isinstance(query, str) else str(key))
    if query is None or key is None:
        normed = "the query" if query is not None else "the key"
        return None if query is key else near_miss(node, f"only {normed} of {node} is normed")
    reason = _difference(query, key)
    if reason:
        return near_miss(node, reason)
    results = _results(node)
    if results is None:
        return near_miss(node, f"{node} is used otherwise than by its two results")
    return node, query, key


def _normed(operand: object, user: fx.Node) -> _Normed | str | None:
    """Return the norm behind an operand, None where there is none, or why it can't be fused."""
    moves: list[fx.Node] = []
    node = operand
    while isinstance(node, fx.Node) and _keeps_rows(node):
        moves.insert(0, node)
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None
    if node.target is not RMS_NORM.overload:
        source = node.args[0] if view.kind(node) in ("view", "reshape", "unflatten") else None
        whole = isinstance(source, fx.Node) and source.target is RMS_NORM.overload
        return f"{source} norms all heads of {node} at once" if whole else None
    for each, after in zip((node, *moves), (*moves, user), strict=True):
        if list(each.users) != [after]:
            return f"{each} is used otherwise than in {after}"
    return _Normed(node, tuple(moves))


def _keeps_rows(node: fx.Node) -> bool:
    """Return whether a node transposes dimensions other than the last."""
    rank = len(view.shape(node) or ())
    if view.kind(node) == "transpose":
        dims = [view.operand(node, i, f"dim{i - 1}") for i in (1, 2)]
        return all(isinstance(dim, int) and dim % rank != rank - 1 for dim in dims)
    return False


def _difference(query: _Normed, key: _Normed) -> str:
    """Return why one op can't do both norms, or nothing."""
    first, second = query.options, key.options
    for name in sorted(first.keys() - {"weight", "out_dtype"}):
        if first[name] != second[name]:
            return f"{query.norm} has {name} {first[name]!r}, {key.norm} has {second[name]!r}"
    for side in (query, key):
        before, after = view.dtype(side.norm.args[0]), view.dtype(side.norm)
        if before != after:
            return f"{side.norm} is {after}, not {before} as what it norms"
    return ""


def _results(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the nodes that read query and key off the op, or None where it is used in another way."""
    found = {user.args[1]: user for user in node.users if view.kind(user) == "getitem"}
    return (found[0], found[1]) if len(node.users) == len(found) == 2 and found.keys() == {0, 1} else None


def _site(rotation: fx.Node, query: _Normed, key: _Normed) -> Site:
    """Return the site, after the transpositions have been put in front of the norms."""
    results = _results(rotation)
    assert results is not None  # find has seen them
    interior: list[fx.Node] = []
    inputs = []
    for side in (query, key):
        inputs.append(_moved_input(side, interior))
        interior += [side.norm, *side.moves]
    options = query.options
    names = {"norm_compute_dtype": "compute_dtype", "normed_dtype": "normed_dtype", "weight_dtype": "weight_dtype"}
    weights = (options["weight"], key.options["weight"])
    return Site(
        anchor=results[0],
        target=QK_NORM_ROTARY.overload,
        args=(*inputs, *weights, *rotation.args[2:], options["eps"]),
        kwargs={
            "offset": options["offset"],
            **{name: options[source] for name, source in names.items()},
            **rotation.kwargs,
        },
        interior=(*interior, rotation, *results),
        outputs=results,
    )


def _moved_input(side: _Normed, interior: list[fx.Node]) -> fx.Node:
    """Return what is normed, transposed already; the norm reads it back through views, which join the interior.

    So the op's interior reads the op's own inputs only, and a device without the op can have the old nodes again.
    """
    source: Any = side.norm.args[0]
    if not side.moves:
        return source  # type: ignore[no-any-return]
    with side.norm.graph.inserting_before(side.norm):
        moved = _transposed(source, side.moves, side.norm)
        back = _transposed(moved, side.moves[::-1], side.norm)
    node = back
    while node is not moved:
        interior.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]  # a transposition, made here
    side.norm.replace_input_with(source, back)
    return moved


def _transposed(node: fx.Node, moves: Sequence[fx.Node], like: fx.Node) -> fx.Node:
    """Insert the same transpositions of another node; each is its own inverse."""
    for move in moves:
        dims = (view.operand(move, 1, "dim0"), view.operand(move, 2, "dim1"))
        made = node.graph.call_method("transpose", (node, *dims))
        value = fake_values(torch.Tensor.transpose, (view.value(node), *dims), {})[""]
        describe(made, like, value)
        node = made
    return node


def run(context: PassContext) -> PassResult:
    """Fuse every rotation of a normed query and key."""
    found = [find(node) for node in context.graph.nodes]
    misses = [item for item in found if isinstance(item, NearMiss)]
    sites = [_site(*item) for item in found if isinstance(item, tuple)]
    if sites and context.analyses is not None:
        context.analyses.invalidate()
    return apply_sites(context, sites, misses)


FUSE_QK_NORM_ROTARY = Pass(name="fuse_qk_norm_rotary", run=run, after=("lift_rms_norm", "lift_rotary"))
