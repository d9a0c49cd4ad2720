"""A right pass that fuses soft caps, `cap * tanh(x / cap)`, to an op, and the ways to get it wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from core.common.passes import view
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.rewrite import fuse
from core.common.passes.sites import Site, near_miss


@torch.library.custom_op("conformance_test::softcap", mutates_args=())
def softcap(x: Tensor, cap: float) -> Tensor:
    """Return `cap * tanh(x / cap)`."""
    return cap * torch.tanh(x / cap)


@softcap.register_fake
def _(x: Tensor, cap: float) -> Tensor:
    return torch.empty_like(x)


SOFTCAP_OP = torch.ops.conformance_test.softcap.default


def finder(factor: float = 1.0, *, greedy: bool = False) -> Callable[[PassContext, fx.Node], Site | NearMiss | None]:
    """Return a finder of soft caps. factor: on the cap that it writes. greedy: takes two caps for one."""

    def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        scaled: Any = node.args[0] if node.args else None
        if view.kind(node) != "tanh" or view.kind(scaled) != "div" or not view.is_number(scaled.args[1]):
            return None
        source, cap = scaled.args
        product = view.only_user(node)
        if product is None or view.kind(product) != "mul" or not view.is_number(view.other(product, node)):
            return near_miss(node, f"{node} is used otherwise than in one product")
        if view.other(product, node) != cap and not greedy:
            return near_miss(node, f"divided by {cap} and multiplied by {view.other(product, node)}")
        interior = (scaled, node, product)
        return Site(anchor=product, target=SOFTCAP_OP, args=(source, float(cap) * factor), interior=interior)

    return find


def softcaps(run: Callable[[PassContext], PassResult], **fields: Any) -> Pass:
    """Return the pass with this function."""
    return Pass(name="softcap", run=run, owner="acme", **fields)


def right(context: PassContext) -> PassResult:
    """Fuse every soft cap."""
    return fuse(context, finder())


def never_fires(context: PassContext) -> PassResult:
    """Look for the soft cap by a name that no graph has."""
    return PassResult(matched=sum(node.target == "softcap" for node in context.graph.nodes))


def scaled(context: PassContext) -> PassResult:
    """Write a cap 2 % too large."""
    return fuse(context, finder(1.02))


def claims_all(context: PassContext) -> PassResult:
    """Report a match for each tanh and do nothing."""
    sites = tuple(node.name for node in context.graph.nodes if view.kind(node) == "tanh")
    return PassResult(matched=len(sites), sites=sites)


def claims_one_more(context: PassContext) -> PassResult:
    """Report one match more than were made, under the name of a site that there is."""
    result = right(context)
    return (
        replace(result, matched=result.matched + 1, sites=(*result.sites, result.sites[0])) if result.sites else result
    )


def claims_nothing(context: PassContext) -> PassResult:
    """Fuse, and say nothing of it."""
    return replace(right(context), matched=0, sites=())


def names_nowhere(context: PassContext) -> PassResult:
    """Report right numbers of sites, under names of no place."""
    result = right(context)
    return replace(result, sites=tuple(f"somewhere.{index}" for index in range(result.matched)))


def greedy(context: PassContext) -> PassResult:
    """Take what is divided by one number and multiplied by another for a soft cap."""
    return fuse(context, finder(greedy=True))


def drops_write(context: PassContext) -> PassResult:
    """Clean up as fx does, which takes an in-place write whose result nobody reads for dead."""
    result = right(context)
    if result.matched:
        context.graph.eliminate_dead_code()
    return result


def unguarded(context: PassContext) -> PassResult:
    """Replace by hand, past a write in between and whoever else reads the interior."""
    sites = []
    for node in list(context.graph.nodes):
        site = finder()(context, node)
        if not isinstance(site, Site):
            continue
        with context.graph.inserting_after(site.anchor):
            new = context.graph.call_function(SOFTCAP_OP, site.args)
        new.meta = dict(site.anchor.meta)
        site.anchor.replace_all_uses_with(new)
        sites.append(site.anchor.name)
    return PassResult(matched=len(sites), sites=tuple(sites))


def drifts(context: PassContext) -> PassResult:
    """Fuse, and on a second run scale what the first one left."""
    known = [node for node in context.graph.nodes if node.target is SOFTCAP_OP]
    if not known:
        return right(context)
    known[0].args = (known[0].args[0], known[0].args[1] * 1.1)
    return PassResult(matched=1, sites=(known[0].name,))


def raises(context: PassContext) -> PassResult:
    """Fail on a graph without a soft cap."""
    result = right(context)
    if not result.matched:
        raise KeyError("tanh")
    return result
