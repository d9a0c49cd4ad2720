"""Whether a site may be rewritten: order, aliasing writes, effects that would be lost or doubled, and metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.node_meta import value_of
from core.common.ops.declaration import find_op
from core.common.passes.context import PassContext
from core.common.passes.effects import is_impure, written_by
from core.common.passes.metadata import Memo, Values
from core.common.passes.original import missing_sizes
from core.common.passes.results import NearMiss
from core.common.passes.sites import Refused, Site, near_miss, other_maker
from core.common.passes.viewed import mapped
from core.common.passes.writes import Writes
from core.errors import PassError


@dataclass(frozen=True, slots=True)
class Plan:
    """A site that may be rewritten."""

    site: Site
    #: The node before which the new op goes.
    before: fx.Node
    #: Positions of that node and of the first replaced node, by which sites are sorted.
    position: tuple[int, int]
    #: Fake values of the new nodes by name.
    values: Mapping[str, Any]
    #: New fake values of nodes that view the result, where its strides change.
    views: Mapping[fx.Node, Any]


def plan_site(context: PassContext, site: Site, memo: Memo) -> Plan | NearMiss:
    """Return the plan of the rewrite, or a near-miss with the reason why the site must stay."""
    order: Mapping[fx.Node, int] = context.analysis("order")
    writes: Writes = context.analysis("writes")
    checked = _Checked(context, site, order, writes, memo)
    _check_form(context, site, checked.inputs)
    try:
        return checked.plan()
    except Refused as refused:
        miss = near_miss(refused.node, refused.reason, claimant=refused.claimant)
        return NearMiss(
            site=near_miss(site.anchor, "").site, reason=miss.reason, node=miss.node, claimant=miss.claimant
        )


def _check_form(context: PassContext, site: Site, inputs: tuple[fx.Node, ...]) -> None:
    """Raise if the site shows a mistake of the finder, which says nothing about the graph."""
    wrong = ""
    first = next(iter(site.replaced), None)
    if first is not site.anchor:
        wrong = f"the first of its outputs is {first}, not the anchor"
    elif any(node in site.replaced for node in inputs):
        wrong = "an argument of the new op is a node that it replaces"
    elif any(not node.op.startswith(("call_", "get_attr")) for node in site.nodes):
        wrong = "its interior holds a placeholder or the output"
    elif context.stage != "torch" and any(each.steps for each in (*site.sources, *filter(None, site.results))):
        wrong = (
            f"it has views of nodes, which are made in graphs of stage 'torch', and this is one of {context.stage!r}"
        )
    if wrong:
        raise PassError(
            f"pass {context.name!r} of {context.owner} at node {site.anchor.name!r}",
            found=wrong,
            remedy="mend the finder: args come from outside, interior is what the op replaces, anchor its first output",
        )


class _Checked:
    """The checks of one site, on the graph as the pass found it."""

    def __init__(
        self, context: PassContext, site: Site, order: Mapping[fx.Node, int], writes: Writes, memo: Memo
    ) -> None:
        self.context, self.site, self.order, self.writes, self.memo = context, site, order, writes, memo
        self.interior = site.nodes
        self.inputs = site.inputs

    def plan(self) -> Plan:
        self._guarded()
        self._affordable()
        before = self._place()
        positions = [self.order[node] for node in (*self.interior, before)]
        span = (min(positions), max(positions))
        new_writes = self._new_writes()
        self._no_write_between(span)
        self._no_effect_lost(new_writes)
        self._no_read_between(span, new_writes)
        self._no_aliasing_output(span)
        first = min(self.order[node] for node in self.site.replaced)
        return Plan(
            self.site,
            before,
            (self.order[before], first),
            *Values(self.site, self.order, self.writes, self.memo).compute(),
        )

    def _guarded(self) -> None:
        anchor = self.site.anchor
        reason = self.context.guards.refuses_value(value_of(anchor))
        if reason is not None:
            raise Refused(anchor, reason)
        for node in self.interior:
            if claimant := other_maker(self.context, node):
                raise Refused(node, f"node {node.name} was made by pass {claimant}", claimant)

    def _affordable(self) -> None:
        """Refuse an op whose reference would run on this device in place of something faster."""
        implemented, target = self.context.implemented, self.site.target
        if implemented is None:
            return
        inlined = isinstance(target, fx.GraphModule)
        targets = [node.target for node in target.graph.nodes] if isinstance(target, fx.GraphModule) else [target]
        for op in filter(None, map(find_op, targets)):
            if not op.costly or op.qualified_name in implemented:
                continue
            interior = sorted(self.interior, key=self.order.__getitem__)
            if inlined or missing_sizes(interior, self.inputs) is None:
                reason = f"the device does not implement {op.qualified_name}, and this form could not be put back"
                raise Refused(self.site.anchor, reason)

    def _place(self) -> fx.Node:
        """Return the node before which the new op goes: the anchor, or an earlier use of another output; the first use,
        where the anchor is memory that is there before what it is filled with."""
        outside = [user for node in self.site.replaced for user in node.users if user not in self.interior]
        anchor = self.site.anchor
        fills = [self.order[writer] for writer in self.writes.writers(anchor) if writer in self.interior]
        for user in anchor.users:
            if user not in self.interior and self.order[user] < max(fills, default=-1):
                raise Refused(user, f"{user.name} reads {anchor.name} before it is filled")
        before = min(outside if fills and outside else [anchor, *outside], key=self.order.__getitem__)
        for node in self.inputs:
            if self.order[node] >= self.order[before]:
                raise Refused(node, f"input {node.name} is computed after {before.name}, which needs the result")
        return before

    def _no_write_between(self, span: tuple[int, int]) -> None:
        for writer in self.writes.writers(*self.inputs, *self.interior):
            if writer not in self.interior and span[0] <= self.order[writer] <= span[1]:
                raise Refused(writer, f"written in between by {writer.name}")

    def _new_writes(self) -> frozenset[object]:
        """Return the storages that the new op writes; it may write only what its interior wrote."""
        args, kwargs = mapped(self.site.args, self.site.kwargs, lambda seen: seen.node)
        written = self.writes.of(*written_by(self.site.target, args, kwargs))
        old: frozenset[object] = frozenset().union(*(self.writes.written.get(n, frozenset()) for n in self.interior))
        if written - old:
            raise Refused(self.site.anchor, "the new op would write where the matched nodes do not")
        return written

    def _no_effect_lost(self, new_writes: frozenset[object]) -> None:
        for node in self.interior:
            outside = [user for user in node.users if user not in self.interior]
            into = self.writes.written.get(node, frozenset())
            if outside and node not in self.site.replaced and (into or is_impure(node)):
                raise Refused(node, f"{node.name} has an effect and {outside[0].name} still uses it")
            for key in into - new_writes:
                if self._is_seen(key, node):
                    raise Refused(node, f"the write of {node.name} would be lost")

    def _is_seen(self, key: object, writer: fx.Node) -> bool:
        """Tell whether the caller or a later read, and not only the site's results, sees a write."""
        for holder in self.writes.holders.get(key, ()):
            if holder.op in ("placeholder", "get_attr"):
                return True
            given_on = holder in self.site.replaced or holder in self.site.overwritten
            if not given_on and self.order[holder] < self.order[writer]:
                users = (user for user in holder.users if user not in self.interior)
                if any(self.order[user] > self.order[writer] for user in users):
                    return True
        return False

    def _no_read_between(self, span: tuple[int, int], new_writes: frozenset[object]) -> None:
        if not new_writes:
            return
        for node, position in self.order.items():
            between = span[0] <= position <= span[1] and node not in self.interior
            if between and self.writes.of(*node.all_input_nodes) & new_writes:
                raise Refused(node, f"{node.name} uses in between what the new op writes")

    def _no_aliasing_output(self, span: tuple[int, int]) -> None:
        shared = self.writes.of(*self.site.replaced) & self.writes.of(*self.inputs) & self.writes.all_written
        for node, into in self.writes.written.items() if shared else ():
            if into & shared and node not in self.interior and self.order[node] >= span[0]:
                raise Refused(node, f"the result shares memory with an input, and {node.name} writes it")
