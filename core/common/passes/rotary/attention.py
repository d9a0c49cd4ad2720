"""Fuse a rotation of query and key, with or without their norms, and the attention after it.

`core::rotary` or `core::qk_norm_rotary` and `core::attention` become `core::rotary_attention`, and no bit changes. The
pass runs only if the device implements that op. Models rotate with the heads first and attention has the tokens first,
so views stand between the two; the op gets query, key and tables as rows of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.ops.canonical import ATTENTION, QK_NORM_ROTARY, ROTARY, ROTARY_ATTENTION, ROTARY_SINGLE
from core.common.passes import Guards, NearMiss, Pass, PassContext, Site, find_op, near_miss, value_of, view
from core.common.passes.rotary.attention_examples import examples
from core.common.passes.rotary.token_rows import LAYOUTS, ROWS, Layout, follow, rows, table_index, table_rows

_ROTATIONS = (ROTARY, QK_NORM_ROTARY)
_OF_ATTENTION = ("scale", "window", "chunked", "softcap", "sinks", "max_query_len", "k_scale", "v_scale")
_ROWS = ("query", "key", "value", "cos", "sin")
_PLACES = ("key_cache", "value_cache", "block_table", "slot_mapping", "seq_lens", "query_starts")


@dataclass(frozen=True, slots=True)
class _Rotated:
    """An operand of attention that a rotation computes: the op, the index of its result, and the views in between, in
    order.

    The first view is the `getitem` of the result.
    """

    rotation: fx.Node
    index: int
    views: tuple[fx.Node, ...]


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return an attention of a rotated query and key; a near-miss if the rotation can't be fused with it."""
    if node.op != "call_function" or find_op(node.target) is not ATTENTION:
        return None
    call = ATTENTION.bind(node.args, node.kwargs).args
    query, key = _rotated(call["query"]), _rotated(call["key"])
    if query is None and key is None:
        return None
    reason = _refusal(node, query, key)
    if reason or query is None or key is None:
        return near_miss(node, reason)
    layout = _layout(query, key)
    if layout is None:
        return near_miss(node, f"the results of {query.rotation} are not read as rows of tokens")
    return _site(node, query, key, layout)


def _rotated(operand: Any) -> _Rotated | None:
    """Return the rotation behind an operand, or None where there is none."""
    views: list[fx.Node] = []
    node = operand
    while isinstance(node, fx.Node):
        op = find_op(node.target) if node.op == "call_function" else None
        if op is ROTARY_SINGLE:
            return _Rotated(node, 0, tuple(views))
        if op in _ROTATIONS:
            index = views[0].args[1] if views and view.kind(views[0]) == "getitem" else None
            return _Rotated(node, index, tuple(views)) if isinstance(index, int) else None
        if view.kind(node) not in ("getitem", "transpose", "squeeze", "select"):
            return None
        views.insert(0, node)
        node = node.args[0]
    return None


def _refusal(node: fx.Node, query: _Rotated | None, key: _Rotated | None) -> str:
    """Return why attention and rotation can't be fused, or ""."""
    call = ATTENTION.bind(node.args, node.kwargs).args
    if query is None or key is None:
        return f"only {'the query' if key is None else 'the key'} of {node} is rotated in its layer"
    if query.rotation is not key.rotation or (query.index, key.index) != (0, 1):
        return f"query and key of {node} are rotated apart, by {query.rotation} and {key.rotation}"
    if call["mask"] is not None:
        return f"{node} has a mask"
    if not call["causal"]:
        return f"{node} is not causal"
    chains = ((query, "query"), (key, "key"))
    if len(query.rotation.users) != 2:
        return f"{query.rotation} is used otherwise than by its two results"
    for side, name in chains:
        for each, after in zip(side.views, (*side.views[1:], node), strict=True):
            others = [user.name for user in each.users if user is not after]
            if others:
                return f"the rotated {name} is used by {', '.join(others)} too"
    return ""


def _layout(query: _Rotated, key: _Rotated) -> Layout | None:
    """Return the meaning of the rotated tensors' dimensions, deduced from the views between rotation and attention."""
    given = _arguments(query.rotation)
    if not all(isinstance(value_of(given[name]), FakeTensor) for name in ("query", "key", "cos", "sin")):
        return None
    for layout in LAYOUTS.get(len(view.shape(given["query"]) or ()), ()):
        if all(follow(layout, side.views[1:]) == ROWS for side in (query, key)):
            return layout
    return None


def _arguments(rotation: fx.Node) -> dict[str, Any]:
    """Return the arguments of a rotation by name, defaults filled in."""
    op = find_op(rotation.target)
    assert op is not None  # the finder has seen it
    return dict(op.bind(rotation.args, rotation.kwargs).args)


def _site(attention: fx.Node, query: _Rotated, key: _Rotated, layout: Layout) -> Site | NearMiss:
    """Return the site of an attention and the rotation before it. layout: that of the rotation's operands."""
    rotation = query.rotation
    given = _arguments(rotation)
    seen = {name: rows(given[name], layout) for name in ("query", "key")}
    for name in ("cos", "sin"):
        index = table_index(layout, given[name], given["query"])
        if index is None:
            shape = view.shape(given[name])
            return near_miss(attention, f"{name} of {rotation} is no row for each token, but {shape}")
        seen[name] = table_rows(given[name], index)
    call = dict(ATTENTION.bind(attention.args, attention.kwargs).args)
    return Site(
        anchor=attention,
        target=ROTARY_ATTENTION.overload,
        args=tuple((call | seen)[name] for name in (*_ROWS, *_PLACES)),
        kwargs={**_options(rotation, given), **{name: call[name] for name in _OF_ATTENTION}},
        interior=(rotation, *query.views, *key.views, attention),
    )


def _options(rotation: fx.Node, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the rotation and of the norms before it."""
    inputs = ("query", "key", "cos", "sin")
    options = {name: value for name, value in given.items() if name not in inputs}
    return {**options, "normalize": True} if find_op(rotation.target) is QK_NORM_ROTARY else options


FUSE_ROTARY_ATTENTION = Pass(
    name="fuse_rotary_attention",
    find=find,
    does="Fuse every rotation of a query and key with the attention of these.",
    after=("lift_rotary", "fuse_qk_norm_rotary", "merge_linears"),
    guards=Guards(implements=frozenset({ROTARY_ATTENTION.qualified_name})),
    examples=examples,
)
