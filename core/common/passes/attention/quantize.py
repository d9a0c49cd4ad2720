"""Fuse attention with the quantisation of its result: `core::attention_quantize`, `core::rotary_attention_quantize`.

Attention gives heads of tokens (T, H, V); the output projection quantises rows (1, T, H * V), so views stand between
the two. The op gives codes of rows, without dimensions in front: nothing is computed otherwise, and no bit changes.
Codes of groups stay apart, since the op has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.ops.attention import (
    ATTENTION,
    ATTENTION_QUANTIZE,
    GRANULARITIES,
    ROTARY_ATTENTION,
    ROTARY_ATTENTION_QUANTIZE,
)
from core.common.passes import (
    LIFTS,
    CanonicalOp,
    Index,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    Site,
    Viewed,
    Writes,
    calls,
    find_op,
    fuse,
    near_miss,
    view,
)
from core.common.passes.attention.quantize_examples import examples
from core.common.passes.quantize.calls import Quantize, behind, read_quantize

_FUSED: Mapping[str, CanonicalOp] = MappingProxyType(
    {ATTENTION.name: ATTENTION_QUANTIZE, ROTARY_ATTENTION.name: ROTARY_ATTENTION_QUANTIZE}
)
_VIEWS = frozenset({"view", "reshape", "flatten", "contiguous", "unsqueeze", "getitem", "squeeze"})


def _fused(node: fx.Node) -> CanonicalOp | None:
    """Return the op that does what this attention does and ends in codes; None where the node is no attention."""
    op = find_op(node.target)
    return None if op is None else _FUSED.get(op.name)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return a quantisation of an attention's rows; a near-miss where the two can't go together."""
    quantize = read_quantize(node)
    if quantize is None:
        return _other_codes(node)
    attention = _source(quantize.x)
    if attention is None:
        return None
    views = _between(attention, quantize)
    reason = _refusal(attention, quantize, views)
    return near_miss(node, reason) if reason else _site(attention, quantize, views)


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


def _site(attention: fx.Node, quantize: Quantize, views: tuple[fx.Node, ...]) -> Site | None:
    """Return the site of an attention and its codes, which are those of rows without dimensions in front."""
    op, fused = find_op(attention.target), _fused(attention)
    assert op is not None and fused is not None  # the search has seen it
    given: dict[str, Any] = {**calls.arguments(attention, op), **quantize.options, "out_scale": quantize.scale}
    given.pop("group_size", None)
    positional = [a.name for a in fused.overload._schema.arguments if not a.kwarg_only]
    num_lead = len(view.shape(quantize.x) or ()) - 2
    steps = (Index((0,) * num_lead),) if num_lead else ()
    members = calls.outputs(quantize.node)
    anchor = next(filter(None, members), None)
    if anchor is None:  # nothing reads the codes
        return None
    return Site(
        anchor=anchor,
        target=fused.overload,
        args=tuple(given.pop(name) for name in positional),
        kwargs=given,
        interior=(attention, *views, quantize.node),
        # A scale for all tokens has no dimensions.
        outputs=tuple(each if each is None or not view.shape(each) else Viewed(each, steps) for each in members),
    )


def run(context: PassContext) -> PassResult:
    """Fuse every attention with the quantisation of its rows."""
    return fuse(context, find)


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
        count += reader is not None and isinstance(find(context, reader), Site)
    return count


FUSE_ATTENTION_QUANTIZE = Pass(
    name="fuse_attention_quantize",
    run=run,
    after=(*LIFTS, "eliminate_common_subexpressions", "merge_linears", "fuse_rotary_attention"),
    expect=expect,
    examples=examples,
)
"""The fusion of attention that ends in codes; `fuse_rotary_attention` comes first."""
