"""The driver of every fusion: find sites, refuse unsafe ones with a reason, rewrite the others.

A pass hands `fuse` a finder, which is asked for every node and answers with a `Site`, a `NearMiss` or None. All sites
are found and judged on the graph as the pass found it (core/common/passes/safety.py); only then is anything changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from core.common.node_meta import describe, set_value
from core.common.ops.declaration import find_op
from core.common.passes.context import PassContext
from core.common.passes.effects import is_impure
from core.common.passes.metadata import Memo
from core.common.passes.original import ORIGINAL, Original
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.safety import Plan, plan_site
from core.common.passes.sites import MADE_BY, Finder, Made, Site, later_readers, near_miss, site_name
from core.common.passes.viewed import Call, Viewed, insert, mapped, sources_of
from core.errors import PassError


def fuse(context: PassContext, find: Finder) -> PassResult:
    """Rewrite every safe site that `find` names; report the others as near-misses with the reason.

    Raises `PassError` where two sites claim one node.
    """
    context.taken.clear()
    found = [find(context, node) for node in context.graph.nodes]
    misses = [item for item in found if isinstance(item, NearMiss)]
    return apply_sites(context, [item for item in found if isinstance(item, Site)], misses)


def apply_sites(context: PassContext, sites: Iterable[Site], misses: Iterable[NearMiss] = ()) -> PassResult:
    """Rewrite the safe ones among these sites of one graph; the part of `fuse` after the search."""
    memo: Memo = {}
    scopes = context.guards.scopes
    modes, known = _autocast(context.graph), {} if scopes is None else scopes(context.graph)
    planned = [_split(site, modes, known) or plan_site(context, site, memo) for site in sites]
    plans = [item for item in planned if isinstance(item, Plan)]
    _refuse_overlaps(context, plans)
    rewriter = _Rewriter(context)
    for plan in sorted(plans, key=lambda plan: plan.position):
        rewriter.insert(plan)
        for view, value in plan.views.items():
            set_value(view, value)
    _erase(context.graph, plans)
    return PassResult(
        matched=len(plans),
        sites=tuple(site_name(plan.site.origin) for plan in plans),
        near_misses=(*misses, *(item for item in planned if isinstance(item, NearMiss))),
    )


def _autocast(graph: fx.Graph) -> Mapping[fx.Node, tuple[object, ...]]:
    """Return the arguments of the autocast regions around each node, outermost first; empty without autocast."""
    if not any(_is_switch(node) for node in graph.nodes):
        return {}
    found: dict[fx.Node, tuple[object, ...]] = {}
    open_regions: list[fx.Node] = []
    for node in graph.nodes:
        if _is_switch(node, "_enter_autocast"):
            open_regions.append(node)
        elif _is_switch(node, "_exit_autocast"):
            open_regions = [region for region in open_regions if region is not node.args[0]]
        found[node] = tuple((region.args, tuple(region.kwargs.items())) for region in open_regions)
    return found


def _is_switch(node: fx.Node, *names: str) -> bool:
    return getattr(node.target, "__name__", "") in (names or ("_enter_autocast", "_exit_autocast"))


def _split(site: Site, modes: Mapping[fx.Node, object], scopes: Mapping[fx.Node, object]) -> NearMiss | None:
    """Refuse a site whose nodes run in several streams or under different autocast: the op runs in only one."""
    found = ((modes, "computes under another autocast"), (scopes, "runs in another stream or scope"))
    for places, differs in found:
        for node in site.nodes if places else ():
            reads_member = places is scopes and node.target is operator.getitem  # a node that runs nothing
            if places[node] != places[site.anchor] and not reads_member:
                return near_miss(site.anchor, f"{node.name} {differs} than {site.anchor.name}")
    return None


def _refuse_overlaps(context: PassContext, plans: Iterable[Plan]) -> None:
    """Refuse two sites of one pass where one would replace what the other computes or replaces."""
    owners: dict[fx.Node, Site] = {}
    for plan in plans:
        for node in plan.site.replaced:
            _claim(context, node, plan.site, owners)
    for plan in plans:
        for node in plan.site.nodes:
            if owners.get(node, plan.site) is not plan.site:
                _claim(context, node, plan.site, owners)


def _claim(context: PassContext, node: fx.Node, site: Site, owners: dict[fx.Node, Site]) -> None:
    other = owners.setdefault(node, site)
    if other is not site:
        raise PassError(
            f"pass {context.name!r} of {context.owner} at {site_name(site.anchor)} (node {site.anchor.name!r})",
            found=f"its site at {site_name(other.anchor)} (node {other.anchor.name!r}) claims node {node.name!r} too",
            remedy="make the finder return one site for these nodes",
        )


class _Rewriter:
    """Inserts the new ops of one pass into its graph, in graph order.

    new: replaced node -> its replacement. views: views made so far, by node and steps; sites share them.
    """

    def __init__(self, context: PassContext) -> None:
        self._context, self._graph = context, context.graph
        self._new: dict[fx.Node, fx.Node] = {}
        self._views: dict[tuple[fx.Node, str], fx.Node] = {}

    def insert(self, plan: Plan) -> None:
        """Put the new op before the plan's node and let it take over the uses."""
        site, context = plan.site, self._context
        made = Made(pass_name=context.name, owner=context.owner, site=site_name(site.origin))
        describe_new = partial(_describe, like=site.origin, made=made)
        args, kwargs = mapped(site.args, site.kwargs, self._renewed)
        with self._graph.inserting_before(plan.before):
            call = mapped(args, kwargs, partial(self._shared, describe=describe_new))
            results: Sequence[fx.Node | None]
            if isinstance(site.target, fx.GraphModule):
                results = _inline(self._graph, site, call[0], plan.values, made)
            else:
                results = self._call(site, (args, kwargs), call, plan.values.get(""), describe_new)
            for old, new in zip(site.results, results, strict=True):
                if old is not None and new is not None:
                    self._replace(site, old, insert(Viewed(new, old.way_back), describe_new), made)
        for reader, node in list(later_readers(site, context.analysis("order"))):
            reader.replace_input_with(node, self._new[site.anchor])
        self._new |= dict.fromkeys(site.overwritten, self._new[site.anchor])

    def _renewed(self, seen: Viewed) -> Any:
        node = self._new.get(seen.node, seen.node)
        return Viewed(node, seen.steps) if seen.steps else node

    def _shared(self, seen: Viewed, describe: Callable[..., object]) -> fx.Node:
        if not seen.steps:
            return seen.node
        key = seen.node, repr(seen.steps)  # a slice can't be hashed
        if key not in self._views:
            self._views[key] = insert(seen, describe)
        return self._views[key]

    def _call(
        self, site: Site, given: Call, call: Call, value: Any, describe: Callable[..., object]
    ) -> list[fx.Node | None]:
        """Insert the call and return the nodes of its results, None for those that nothing reads."""
        node = self._graph.call_function(site.target, *call)
        describe(node, value)
        if find_op(site.target) is not None:
            interior = sorted(site.nodes, key=self._context.analysis("order").__getitem__)
            node.meta[ORIGINAL] = Original.of(interior, node, sources_of(*given), site.results)
        if len(site.results) == 1:
            return [node]
        members: list[fx.Node | None] = []
        for index, result in enumerate(site.results):
            member = None if result is None else self._graph.call_function(operator.getitem, (node, index))
            if member is not None and result is not None:
                describe(member, None if value is None else value[index], like=result.node)
            members.append(member)
        return members

    def _replace(self, site: Site, old: Viewed, new: fx.Node, made: Made) -> None:
        if new.meta.get(MADE_BY) is made:  # false if the replacement returns one of its inputs
            new.meta[MADE_BY] = replace(made, replaced=(old.node.name,))
        self._new[old.node] = new
        inside = site.nodes
        # Nodes of the site itself keep reading the old value: they are erased, or stay unchanged.
        old.node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)


def _inline(graph: fx.Graph, site: Site, args: Any, values: Mapping[str, Any], made: Made) -> Sequence[fx.Node]:
    source = site.target.graph  # type: ignore[attr-defined]  # a GraphModule, as the caller has checked
    inputs = [node for node in source.nodes if node.op == "placeholder"]
    copied: dict[fx.Node, Any] = dict(zip(inputs, args, strict=True))
    results = graph.graph_copy(source, copied)
    for old, new in copied.items():
        if isinstance(new, fx.Node) and old.op != "placeholder":
            new.meta = {}
            _describe(new, values.get(old.name), site.origin, made)
    found: list[fx.Node] = list(results) if isinstance(results, (tuple, list)) else [results]  # type: ignore[list-item]
    given: Any = values.get("")
    for new, value in zip(found, given if len(found) > 1 else (given,), strict=True):
        if new.meta.get(MADE_BY) is made and value is not None:
            set_value(new, value, site.anchor)
    return found


def _describe(node: fx.Node, value: Any, like: fx.Node, made: Made) -> None:
    describe(node, like, value)
    node.meta[MADE_BY] = made


def _erase(graph: fx.Graph, plans: Iterable[Plan]) -> None:
    """Erase the matched nodes that nothing uses any more, and no other node: a graph may hide writes anywhere."""
    matched = {node for plan in plans for node in plan.site.nodes}
    for node in reversed(list(graph.nodes) if matched else []):
        if node in matched and not node.users:
            graph.erase_node(node)


def remove_dead(graph: fx.Graph) -> int:
    """Erase every node without users and without an effect; return how many went."""
    erased = 0
    for node in reversed(list(graph.nodes)):
        if not node.users and not is_impure(node):
            graph.erase_node(node)
            erased += 1
    return erased
