"""Fuse a rotation of query and key, with or without their norms, and the attention after it.

`core::rotary` or `core::qk_norm_rotary` and `core::attention` become `core::rotary_attention`, and no bit changes. Only
where the device brings that op. Models rotate with the heads first and attention has the tokens first, so views stand
between the two; the op gets query, key and tables through views of its own, made in front of the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.ops.canonical import ATTENTION, QK_NORM_ROTARY, ROTARY, ROTARY_ATTENTION, ROTARY_SINGLE
from core.common.passes import (
    Guards,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    Site,
    apply_sites,
    find_op,
    near_miss,
    view,
)
from core.common.passes.rotary.attention_examples import examples
from core.common.passes.rotary.token_rows import LAYOUTS, ROWS, Layout, Views, follow, table_index

_ROTATIONS = (ROTARY, QK_NORM_ROTARY)
_OF_ATTENTION = ("scale", "window", "softcap", "sinks", "max_query_len", "k_scale", "v_scale")
_ROWS = ("query", "key", "value", "cos", "sin")
_PLACES = ("key_cache", "value_cache", "block_table", "slot_mapping", "seq_lens", "query_starts")


@dataclass(frozen=True, slots=True)
class _Rotated:
    """An operand of attention that a rotation gives: the op, which of its results, and the views in between, in order.

    The first of the views reads the result off the op.
    """

    rotation: fx.Node
    index: int
    views: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """An attention whose query and key one rotation gives. layout: what the dimensions of its operands are."""

    attention: fx.Node
    query: _Rotated
    key: _Rotated
    layout: Layout


def find(node: fx.Node) -> _Found | NearMiss | None:
    """Return an attention of a rotated query and key; a near-miss where the rotation can't go with it."""
    if node.op != "call_function" or find_op(node.target) is not ATTENTION:
        return None
    call = ATTENTION.bind(node.args, node.kwargs).args
    query, key = _rotated(call["query"]), _rotated(call["key"])
    if query is None and key is None:
        return None
    reason = _refusal(node, query, key)
    if reason or query is None or key is None:
        return near_miss(node, reason)
    rotation = query.rotation
    layout = _layout(query, key)
    if layout is None:
        return near_miss(node, f"the results of {rotation} are not read as rows of tokens")
    given = _arguments(rotation)
    for name in ("cos", "sin"):
        if table_index(layout, given[name], given["query"]) is None:
            shape = view.shape(given[name])
            return near_miss(node, f"{name} of {rotation} is no row for each token, but {shape}")
    return _Found(node, query, key, layout)


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
    """Return why attention and rotation must stay apart, or nothing."""
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
    """Return what the dimensions of the rotated query and key are, as the way to attention's rows tells."""
    given = _arguments(query.rotation)
    if not all(isinstance(view.value(given[name]), FakeTensor) for name in ("query", "key", "cos", "sin")):
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


class _Maker:
    """Makes the sites of one graph. The rotations read their inputs through views there, until they are replaced."""

    def __init__(self) -> None:
        self._tables: dict[tuple[fx.Node, Layout], Any] = {}
        self._before: dict[fx.Node, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._made: list[fx.Node] = []

    def site(self, found: _Found) -> Site:
        """Return the site, after the views have been put in front of the rotation.

        The op's interior so reads the op's own inputs only, and a device that refuses it can have the old nodes again.
        """
        rotation, layout = found.query.rotation, found.layout
        given, views, backs = _arguments(rotation), Views(rotation), Views(rotation)
        rows = {name: views.rows(given[name], layout) for name in ("query", "key")}
        for name in ("cos", "sin"):
            key = given[name], layout
            if key not in self._tables:
                index = table_index(layout, given[name], given["query"]) or ()
                self._tables[key] = views.table(given[name], index)
            rows[name] = self._tables[key]
        whole = {name: backs.undo(front, back) for name, (front, back) in rows.items()}
        fronts = {name: front for name, (front, _) in rows.items()}
        self._made += (*views.made, *backs.made)
        self._before[rotation] = rotation.args, rotation.kwargs
        self._read(rotation, whole)
        call = dict(ATTENTION.bind(found.attention.args, found.attention.kwargs).args)
        chains = (*found.query.views, *found.key.views)
        return Site(
            anchor=found.attention,
            target=ROTARY_ATTENTION.overload,
            args=tuple((call | fronts)[name] for name in (*_ROWS, *_PLACES)),
            kwargs={**_options(rotation, given), **{name: call[name] for name in _OF_ATTENTION}},
            interior=(*backs.made, rotation, *chains, found.attention),
        )

    @staticmethod
    def _read(rotation: fx.Node, whole: Mapping[str, fx.Node]) -> None:
        """Let a rotation read these in the place of its query, key and tables."""
        op = find_op(rotation.target)
        assert op is not None  # the finder has seen it
        names = [argument.name for argument in op.overload._schema.arguments]
        rotation.args = tuple(whole.get(name, each) for name, each in zip(names, rotation.args, strict=False))
        rotation.kwargs = {name: whole.get(name, each) for name, each in rotation.kwargs.items()}

    def clean(self, graph: fx.Graph) -> None:
        """Take the views away again where a site was refused."""
        alive = set(graph.nodes)
        for rotation, (args, kwargs) in self._before.items():
            if rotation in alive:
                rotation.args, rotation.kwargs = args, kwargs
        for node in reversed(self._made):
            if node in alive and not node.users:
                graph.erase_node(node)


def _options(rotation: fx.Node, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the op rotates, and norms before that: the rotation's own options."""
    inputs = ("query", "key", "cos", "sin")
    options = {name: value for name, value in given.items() if name not in inputs}
    return {**options, "normalize": True} if find_op(rotation.target) is QK_NORM_ROTARY else options


def run(context: PassContext) -> PassResult:
    """Fuse every rotation of a query and key with the attention of these."""
    found = [item for item in map(find, context.graph.nodes) if item is not None]
    misses = [item for item in found if isinstance(item, NearMiss)]
    maker = _Maker()
    sites = [maker.site(item) for item in found if isinstance(item, _Found)]
    if sites and context.analyses is not None:
        context.analyses.invalidate()
    result = apply_sites(context, sites, misses)
    maker.clean(context.graph)
    return result


FUSE_ROTARY_ATTENTION = Pass(
    name="fuse_rotary_attention",
    run=run,
    after=("lift_rotary", "fuse_qk_norm_rotary", "merge_linears"),
    guards=Guards(implements=frozenset({ROTARY_ATTENTION.qualified_name})),
    examples=examples,
)
