"""Fuse the norms of query and key with the rotary embedding after them to `core::qk_norm_rotary`.

Runs after `lift_rms_norm` and `lift_rotary` and changes no bit. Models norm each head before they put the heads first,
so transpositions stand between norm and rotation; each row is normed by itself, so the op may get them transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.ops.canonical import QK_NORM_ROTARY, RMS_NORM, ROTARY
from core.common.passes import NearMiss, Pass, PassContext, Site, Swap, Viewed, near_miss, view


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

    @property
    def moved(self) -> Viewed:
        """The tensor before the norm, transposed as the rotation reads it."""
        source: Any = self.norm.args[0]
        return Viewed(source, tuple(Swap(*dims) for dims in map(view.swapped_dims, self.moves) if dims is not None))


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the rotation of a normed query and key with the two norms; a near-miss if they can't be fused."""
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
    return _site(node, results, query, key)


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
    dims = view.swapped_dims(node)
    return dims is not None and len(view.shape(node) or ()) - 1 not in dims


def _difference(query: _Normed, key: _Normed) -> str:
    """Return why one op can't compute both norms, or ""."""
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
    """Return the `getitem` nodes of query and key, or None if the op's result is used in another way."""
    found = {user.args[1]: user for user in node.users if view.kind(user) == "getitem"}
    return (found[0], found[1]) if len(node.users) == len(found) == 2 and found.keys() == {0, 1} else None


def _site(rotation: fx.Node, results: tuple[fx.Node, fx.Node], query: _Normed, key: _Normed) -> Site:
    options = query.options
    names = {"norm_compute_dtype": "compute_dtype", "normed_dtype": "normed_dtype", "weight_dtype": "weight_dtype"}
    weights = (options["weight"], key.options["weight"])
    return Site(
        anchor=results[0],
        target=QK_NORM_ROTARY.overload,
        args=(query.moved, key.moved, *weights, *rotation.args[2:], options["eps"]),
        kwargs={
            "offset": options["offset"],
            **{name: options[source] for name, source in names.items()},
            **rotation.kwargs,
        },
        interior=(query.norm, *query.moves, key.norm, *key.moves, rotation),
        outputs=results,
    )


FUSE_QK_NORM_ROTARY = Pass(
    name="fuse_qk_norm_rotary",
    find=find,
    does="Fuse every rotation of a normed query and key.",
    after=("lift_rms_norm", "lift_rotary"),
)
