"""Faults of the soft cap pass: each takes the plugin's passes and returns them with another run function."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from core.common.passes import NearMiss, Pass, PassContext, PassFunction, PassResult, Site, fuse, site_name, view
from torch import fx

from core_acme.passes import find

_KEPT = 3
_BLOCK = 8192  # columns that a block of the simulated device holds

Passes = tuple[Pass, ...]
Fault = Callable[[Passes], Passes]


def _running(run: PassFunction) -> Fault:
    """Make a function the fault of its name: the passes run it."""
    return lambda passes: tuple(replace(each, find=None, run=run) for each in passes)


def _finding(find: Callable[[PassContext, fx.Node], Site | NearMiss | None]) -> Fault:
    """Make a function the fault of its name: the passes fuse what it finds."""
    return _running(lambda context: fuse(context, find))


pass_never_fires = _finding(lambda context, node: None)  # looks for a spelling that no model has


@_finding
def pass_scale(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Hand the kernel another cap than the model has."""
    found = find(context, node)
    if not isinstance(found, Site):
        return found
    source, cap = found.args
    return replace(found, args=(source, cap * 1.02))


@_running
def pass_claims(context: PassContext) -> PassResult:
    """Report what was found before anything is rewritten, and forget to rewrite it."""
    found = [find(context, node) for node in context.graph.nodes]
    sites = tuple(site_name(item.anchor) for item in found if isinstance(item, Site))
    misses = tuple(item for item in found if isinstance(item, NearMiss))
    return PassResult(matched=len(sites), sites=sites, near_misses=misses)


@_finding
def pass_greedy(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Read the cap where x is divided by it, and not compare it with what the product is taken with."""
    found, product = find(context, node), view.only_user(node)
    if not isinstance(found, NearMiss) or product is None or view.kind(product) != "mul":
        return found
    source, cap = node.args[0].args  # type: ignore[union-attr]  # `find` has seen the quotient
    return Site(
        anchor=product,
        target=torch.ops.acme.softcap.default,
        args=(source, float(cap)),  # type: ignore[arg-type]  # a number
        interior=(node.args[0], node, product),  # type: ignore[arg-type]  # a node
    )


@_running
def pass_fourth(context: PassContext) -> PassResult:
    """Keep what was found in a table of three rows."""
    caps: list[float] = []

    def found(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        site = find(context, node)
        if not isinstance(site, Site):
            return site
        source, cap = site.args
        caps.append(cap)
        return replace(site, args=(source, cap if len(caps) <= _KEPT else caps[0] * 1.1))

    return fuse(context, found)


@torch.library.custom_op("acme_faults::softcap_narrow", mutates_args=())
def softcap_narrow(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Cap what one block holds of a row, and copy the rest."""
    result = cap * torch.tanh(x / cap)
    result[..., _BLOCK:] = x[..., _BLOCK:]
    return result


@softcap_narrow.register_fake
def _softcap_narrow_fake(x: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.empty_like(x)


@_finding
def pass_wide(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Launch a kernel that is made for narrow rows."""
    found = find(context, node)
    return replace(found, target=torch.ops.acme_faults.softcap_narrow.default) if isinstance(found, Site) else found


@_running
def pass_drops_write(context: PassContext) -> PassResult:
    """Tidy up after the fusion as if a call without users did nothing."""
    result = fuse(context, find)
    for node in reversed(context.graph.nodes):
        if node.op in ("call_function", "call_method") and not node.users:
            context.graph.erase_node(node)
    return result


def rank_passes(passes: Passes) -> Passes:
    """Order passes by what was found on the card, which differs from card to card."""
    # Passes are registered before the processes meet: only what started them has told the rank by then.
    second = os.environ.get("RANK") == "1"
    return tuple(replace(each, before=("lift_collectives",)) for each in passes) if second else passes
