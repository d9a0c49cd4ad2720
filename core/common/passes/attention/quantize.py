"""Fuse attention with the quantisation of its result: `core::attention_quantize`, `core::rotary_attention_quantize`.

Attention gives heads of tokens (T, H, V); the output projection quantises rows (1, T, H * V), so views stand between
the two. The op gives codes of rows, and views put the dimensions in front back, behind it: nothing is computed
otherwise, and no bit changes. Codes of groups stay apart, since the op has none.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.ops.attention import GRANULARITIES
from core.common.ops.canonical import (
    ATTENTION,
    ATTENTION_QUANTIZE,
    QUANTIZE,
    ROTARY_ATTENTION,
    ROTARY_ATTENTION_QUANTIZE,
)
from core.common.passes import (
    LIFTS,
    CanonicalOp,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    Site,
    Writes,
    apply_sites,
    calls,
    describe,
    find_op,
    near_miss,
    set_value,
    view,
)
from core.common.passes.attention.quantize_examples import examples
from core.common.passes.quantize.calls import Quantize, behind, name_results, read_quantize

_FUSED: Mapping[str, CanonicalOp] = MappingProxyType(
    {ATTENTION.name: ATTENTION_QUANTIZE, ROTARY_ATTENTION.name: ROTARY_ATTENTION_QUANTIZE}
)
_VIEWS = frozenset({"view", "reshape", "flatten", "contiguous", "unsqueeze", "getitem", "squeeze"})


@dataclass(frozen=True, slots=True)
class _Found:
    """An attention whose rows alone are quantised. views: between the two, in order. lead: dimensions before rows."""

    attention: fx.Node
    quantize: Quantize
    views: tuple[fx.Node, ...]
    lead: int


def _fused(node: fx.Node) -> CanonicalOp | None:
    """Return the op that does what this attention does and ends in codes; None where the node is no attention."""
    op = find_op(node.target)
    return None if op is None else _FUSED.get(op.name)


def find(node: fx.Node) -> _Found | NearMiss | None:
    """Return a quantisation of an attention's rows; a near-miss where the two can't go together."""
    quantize = read_quantize(node)
    if quantize is None:
        return _other_codes(node)
    attention = _source(quantize.x)
    if attention is None:
        return None
    views = _between(attention, quantize)
    reason = _refusal(attention, quantize, views)
    if reason:
        return near_miss(node, reason)
    return _Found(attention, quantize, views, len(view.shape(quantize.x) or ()) - 2)


def _source(x: fx.Node) -> fx.Node | None:
    """Return the attention whose result, cast or laid out anew, a node is, or None."""
    while _fused(x) is None:
        source: Any = behind(x)[0]
        # An index of a tensor too: one by None puts a dimension in front, and takes nothing away.
        if source is x and view.kind(x) == "getitem" and isinstance(view.value(x.args[0]), FakeTensor):
            source = x.args[0]
        if source is x or not isinstance(source, fx.Node):
            return None
        x = source
    return x


def _other_codes(node: fx.Node) -> NearMiss | None:
    op = find_op(node.target)
    if op is None or not op.name.startswith("quantize_") or not isinstance(node.args[0], fx.Node):
        return None
    attention = _source(node.args[0])
    if attention is None:
        return None
    return near_miss(node, f"{op.qualified_name} gives other codes than those of attention can be")


def _between(attention: fx.Node, quantize: Quantize) -> tuple[fx.Node, ...]:
    """Return what stands between an attention and the quantisation of its rows, in order."""
    found: list[fx.Node] = []
    node = quantize.x
    while node is not attention:
        found.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]  # a view's input is a node, as `_source` has seen
    return tuple(found)


def _keeps_order(node: fx.Node) -> bool:
    """Tell whether a node is a view of all elements in their order, whatever the dimensions are."""
    if view.kind(node) != "getitem":
        return view.kind(node) in _VIEWS
    index = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or part == slice(None) for part in parts)


def _refusal(attention: fx.Node, quantize: Quantize, views: tuple[fx.Node, ...]) -> str:
    """Return why attention and quantisation must stay apart, or nothing."""
    op = _fused(attention)
    assert op is not None  # the search has seen it
    fused = op.qualified_name
    if others := [each for each in views if not _keeps_order(each)]:
        return f"{others[0]} stands between {attention} and its codes"
    if quantize.unknown:
        return f"it sets {', '.join(quantize.unknown)}, which {fused} does not take"
    granularity = quantize.options.get("granularity", "token")
    if granularity not in GRANULARITIES:
        return f"its scales are one per {granularity}, and {fused} makes one per {' or '.join(GRANULARITIES)}"
    if granularity == "token" and quantize.scale is not None:
        return f"each token has a scale given, and {fused} makes those"
    for each, after in zip((attention, *views), (*views, quantize.node), strict=True):
        others = [user for user in each.users if user is not after]
        if others:
            return f"{others[0]} reads {each} too"
    if not _is_rows(attention, quantize.x):
        return f"what it quantises are no rows of all heads of a token, but {view.shape(quantize.x)}"
    further = [user for user in quantize.node.users if user not in calls.results(quantize.node).values()]
    return f"{further[0]} reads a result of {quantize.node} a second time" if further else ""


def _is_rows(attention: fx.Node, x: fx.Node) -> bool:
    """Tell whether x is (..., T, H * V) of a result (T, H, V), with ones in front."""
    result, sizes = view.value(attention), view.shape(x)
    if not isinstance(result, FakeTensor) or sizes is None or len(sizes) < 2:
        return False
    rows = (result.shape[0], result.shape[1] * result.shape[2])
    return view.same_sizes(tuple(sizes[-2:]), rows) and all(type(size) is int and size == 1 for size in sizes[:-2])


@dataclass(frozen=True, slots=True)
class _Record:
    """A view as it was before it was erased. args: those after the first, which is what it views."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(slots=True)
class _Moved:
    """One quantisation that reads rows of attention itself, and what it was before. restored: views after results."""

    found: _Found
    rows: fx.Node
    value: Any
    views: list[_Record]
    results: list[tuple[fx.Node, Any]] = field(default_factory=list)
    restored: list[fx.Node] = field(default_factory=list)

    @classmethod
    def of(cls, found: _Found) -> _Moved:
        """Let the quantisation read the attention's rows, and views after it give what it gave."""
        node, graph = found.quantize.node, found.quantize.node.graph
        views = [_Record(each, each.args[1:], dict(each.kwargs)) for each in found.views]
        with graph.inserting_before(node):
            rows = graph.call_method("flatten", (found.attention, 1))
        wide = view.value(found.attention)
        describe(rows, found.attention, wide.flatten(1))
        moved = cls(found, rows, view.value(node), views)
        index = (0,) * found.lead
        set_value(node, tuple(value[index] if value.dim() else value for value in moved.value))
        for position, member in sorted(calls.results(node).items()):
            old = view.value(member)
            moved.results.append((member, old))
            if found.lead and old.dim():
                with graph.inserting_after(member):
                    back = graph.call_function(operator.getitem, (member, (None,) * found.lead))
                describe(back, member, old)
                _replace(member, back)
                # What has the old shape has the old name: by it, verification compares with the value of before.
                name = member.name
                member._rename(f"{name}_rows")
                back.name = name
                moved.restored.append(back)
            set_value(member, view.value(node)[position])
        node.replace_input_with(found.quantize.x, rows)
        for each in reversed(found.views):
            graph.erase_node(each)
        return moved

    def site(self) -> Site:
        """Return the site of an attention, its rows and their codes."""
        op, fused, quantize = find_op(self.found.attention.target), _fused(self.found.attention), self.found.quantize
        assert op is not None and fused is not None  # the finder has seen it
        given: dict[str, Any] = {
            **calls.arguments(self.found.attention, op),
            **quantize.options,
            "out_scale": quantize.scale,
        }
        given.pop("group_size", None)
        positional = [a.name for a in fused.overload._schema.arguments if not a.kwarg_only]
        outputs = tuple(member for member, _ in self.results)
        return Site(
            anchor=outputs[0],
            target=fused.overload,
            args=tuple(given.pop(name) for name in positional),
            kwargs=given,
            interior=(self.found.attention, self.rows, quantize.node, *outputs),
            outputs=outputs,
        )

    def undo(self) -> None:
        """Put the views back to where they were."""
        node = self.found.quantize.node
        graph, source = node.graph, self.found.attention
        with graph.inserting_before(self.rows):
            for view_was in self.views:
                old, args = view_was.node, (source, *view_was.args)
                source = graph.create_node(old.op, old.target, args, dict(view_was.kwargs), old.name)
                source.meta = dict(old.meta)
        node.replace_input_with(self.rows, source)
        graph.erase_node(self.rows)
        for back in self.restored:
            member: fx.Node = back.args[0]  # type: ignore[assignment]  # the result that it views
            back.replace_all_uses_with(member)
            member.name = back.name
            graph.erase_node(back)
        for member, value in self.results:
            set_value(member, value)
        set_value(node, self.value)


def _replace(member: fx.Node, back: fx.Node) -> None:
    member.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)


def run(context: PassContext) -> PassResult:
    """Fuse every attention with the quantisation of its rows."""
    name_results(context, (QUANTIZE,))
    found = [item for item in map(find, context.graph.nodes) if item is not None]
    misses = [item for item in found if isinstance(item, NearMiss)]
    moved = [_Moved.of(item) for item in found if isinstance(item, _Found)]
    if moved and context.analyses is not None:
        context.analyses.invalidate()
    result = apply_sites(context, [each.site() for each in moved], misses)
    alive = set(context.graph.nodes)
    for each in moved:
        if each.rows in alive:  # refused
            each.undo()
    return result


def expect(context: PassContext) -> int | None:
    """Count from the other side: attentions whose rows go to one quantisation; None where others write memory.

    A write may come in between, which only the graph's order tells.
    """
    writes: Writes = context.analysis("writes")
    if any(into and _fused(node) is None for node, into in writes.written.items()):
        return None
    count = 0
    for node in context.graph.nodes:
        reader = view.only_user(node) if _fused(node) is not None else None
        while reader is not None and view.kind(reader) in _VIEWS:
            reader = view.only_user(reader)
        count += reader is not None and isinstance(find(reader), _Found)
    return count


FUSE_ATTENTION_QUANTIZE = Pass(
    name="fuse_attention_quantize",
    run=run,
    after=(*LIFTS, "eliminate_common_subexpressions", "merge_linears", "fuse_rotary_attention"),
    expect=expect,
    examples=examples,
)
"""The fusion of attention that ends in codes; `fuse_rotary_attention` comes first."""
