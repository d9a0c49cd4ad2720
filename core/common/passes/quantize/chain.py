"""Chains that end in quantised codes: an op, the quantisation that is its only reader, and the fused op for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.ops.quantize import QUANTIZE
from core.common.passes import (
    LIFTS,
    CanonicalOp,
    Index,
    NearMiss,
    Pass,
    PassContext,
    Site,
    Viewed,
    Writes,
    calls,
    find_op,
    near_miss,
    value_of,
    view,
)

_BETWEEN = frozenset(
    {"cast", "view", "reshape", "flatten", "unflatten", "contiguous", "transpose", "squeeze", "unsqueeze", "clone"}
)
_IN_ORDER = frozenset({"view", "reshape", "flatten", "contiguous", "unsqueeze", "squeeze"})


@dataclass(frozen=True, slots=True)
class Quantize:
    """One call of `core::quantize` of a node's value."""

    node: fx.Node
    x: fx.Node
    scale: fx.Node | None
    #: The quantisation's other arguments, by name, without those that equal the schema's defaults.
    options: Mapping[str, Any]


def read_quantize(node: fx.Node) -> Quantize | None:
    """Return the call at a node, or None where it is no `core::quantize` of a node's value."""
    if find_op(node.target) is not QUANTIZE:
        return None
    given = calls.arguments(node, QUANTIZE)
    x, scale = given.pop("x"), given.pop("scale", None)
    return Quantize(node, x, scale, given) if isinstance(x, fx.Node) else None


@dataclass(frozen=True, slots=True)
class Link:
    """A call, and the quantisation of its first result."""

    call: fx.Node
    #: The fused op.
    fused: CanonicalOp
    #: The call's first result, then the casts and views on its way to the quantisation.
    steps: tuple[fx.Node, ...]
    quantize: Quantize


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The ops of such chains, their fused ops, and what the fused ops can't do."""

    #: Name of an op -> its fused op, which takes the arguments of both by name.
    fused: Mapping[str, CanonicalOp]
    #: Arguments of the first op that have another name in the fused op.
    renamed: Mapping[str, str] = field(default_factory=dict)
    #: The name of the scale in the fused op.
    scale: str = "scale"
    #: The fused op returns rows (two dimensions), so views that keep the order of all elements may come in between.
    rows: bool = False
    #: Returns why the fused op can't replace both, or "".
    why_not: Callable[[Link], str] | None = None

    def find(self, context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        """Return the site of an op and the quantisation of its value, with all results of both."""
        quantize = read_quantize(node)
        if quantize is None:
            return self._other_codes(node)
        link = self._link(quantize)
        if link is None:
            return None
        reason = self._refusal(link)
        return near_miss(node, reason) if reason else self._site(link)

    def expect(self, context: PassContext) -> int | None:
        """Count the ops whose value only a quantisation reads; None if the graph writes memory.

        A write may come in between, which only the order of the graph shows.
        """
        writes: Writes = context.analysis("writes")
        if any(into and self._both(node) is None for node, into in writes.written.items()):
            return None
        return sum(self._both(node) is not None and self._is_owed(node) for node in context.graph.nodes)

    def _is_owed(self, call: fx.Node) -> bool:
        reader = calls.outputs(call)[0]
        if reader is not None:
            reader = view.only_user(reader)
        while reader is not None and self._passes(reader):
            reader = view.only_user(reader)
        quantize = None if reader is None else read_quantize(reader)
        link = None if quantize is None else self._link(quantize)
        return link is not None and not self._unfit(link)

    def _both(self, call: Any) -> CanonicalOp | None:
        """Return the fused op for a call; None for a call of another op."""
        op = find_op(call.target) if isinstance(call, fx.Node) else None
        return None if op is None else self.fused.get(op.name)

    def _passes(self, node: fx.Node) -> bool:
        """Tell whether a node may stand in between: a view of all elements in their order."""
        if not self.rows or view.kind(node) != "getitem":
            return self.rows and view.kind(node) in _IN_ORDER
        index = node.args[1]
        parts = index if isinstance(index, tuple) else (index,)
        return all(part is None or part is ... or part == slice(None) for part in parts)

    def _link(self, quantize: Quantize) -> Link | None:
        """Return the call whose first result (or a cast or view of it) is quantised; None if there is none."""
        steps: list[fx.Node] = []
        x: Any = quantize.x
        while isinstance(x, fx.Node):
            steps.insert(0, x)
            first = view.kind(x) == "getitem" and x.args[1] == 0
            source: Any = x.args[0] if x.args else None
            call = source if first and isinstance(value_of(source), tuple) else x
            both = self._both(call)
            if both is not None:
                return Link(call, both, tuple(steps), quantize)
            # Indexing with None also counts as a view: it only adds a leading dimension.
            indexes = view.kind(x) == "getitem" and isinstance(value_of(source), FakeTensor)
            x = source if indexes or view.kind(x) in _BETWEEN else None
        return None

    def _other_codes(self, node: fx.Node) -> NearMiss | None:
        """Return the near-miss of a kind of quantisation that has no fused op."""
        op = find_op(node.target)
        if op is None or not op.name.startswith("quantize_") or not isinstance(node.args[0], fx.Node):
            return None
        link = self._link(Quantize(node, node.args[0], None, {}))
        if link is None:
            return None
        return near_miss(node, f"{op.qualified_name} gives other codes than {link.fused.qualified_name}")

    def _refusal(self, link: Link) -> str:
        """Return why the two can't be fused, or ""."""
        _, *views = link.steps
        if others := [each for each in views if not self._passes(each)]:
            return f"{others[-1]} stands between {link.call} and its codes"
        if reason := self._unfit(link):
            return reason
        for each, after in zip(link.steps, (*views, link.quantize.node), strict=True):
            if readers := [user for user in each.users if user is not after]:
                return f"{readers[0]} reads {each} too"
        return ""

    def _unfit(self, link: Link) -> str:
        reason = "" if self.why_not is None else self.why_not(link)
        known = {argument.name for argument in link.fused.overload._schema.arguments}
        unknown = ", ".join(name for name in link.quantize.options if name not in known)
        return reason or (f"it sets {unknown}, which {link.fused.qualified_name} does not take" if unknown else "")

    def _site(self, link: Link) -> Site | None:
        op, quantize = find_op(link.call.target), link.quantize
        assert op is not None  # the search has seen it
        given = {self.renamed.get(name, name): value for name, value in calls.arguments(link.call, op).items()}
        given |= {**quantize.options, self.scale: quantize.scale}
        num_lead = len(view.shape(quantize.x) or ()) - 2 if self.rows else 0
        # One scale for all tokens has no dimensions.
        codes = tuple(
            Viewed(each, (Index((0,) * num_lead),)) if each is not None and num_lead and view.shape(each) else each
            for each in calls.outputs(quantize.node)
        )
        outputs = (*codes, *calls.outputs(link.call)[1:])
        return calls.site(link.fused, given, (link.call, *link.steps, quantize.node), outputs)


_AFTER = (*LIFTS, "eliminate_common_subexpressions", "merge_linears")


def declare_chain(
    name: str, does: str, chain: Chain, *, examples: Callable[[], Iterable[Any]], after: tuple[str, ...]
) -> Pass:
    """Return the pass that fuses every such chain, ordered after the passes that lift or merge the chain's ops."""
    return Pass(name=name, does=does, find=chain.find, expect=chain.expect, examples=examples, after=(*_AFTER, *after))
