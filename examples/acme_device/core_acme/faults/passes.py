"""Faults of the soft cap pass: each takes the plugin's passes and returns them with another run function."""

from __future__ import annotations

from dataclasses import replace

import torch
from core.common.passes import NearMiss, Pass, PassContext, PassFunction, PassResult, Site, fuse, site_name, view
from torch import fx

from core_acme.passes import find, fuse_softcap

Passes = tuple[Pass, ...]


def _with(passes: Passes, run: PassFunction) -> Passes:
    return tuple(replace(each, run=run) for each in passes)


def pass_never_fires(passes: Passes) -> Passes:
    """Look for a spelling that no model has."""
    return _with(passes, lambda context: fuse(context, lambda _, node: None))


def pass_scale(passes: Passes) -> Passes:
    """Hand the kernel another cap than the model has."""

    def find_wrong(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        found = find(context, node)
        if not isinstance(found, Site):
            return found
        source, cap = found.args
        return replace(found, args=(source, cap * 1.02))

    return _with(passes, lambda context: fuse(context, find_wrong))


def pass_claims(passes: Passes) -> Passes:
    """Report what was found before anything is rewritten, and forget to rewrite it."""

    def run(context: PassContext) -> PassResult:
        found = [find(context, node) for node in context.graph.nodes]
        sites = tuple(site_name(item.anchor) for item in found if isinstance(item, Site))
        misses = tuple(item for item in found if isinstance(item, NearMiss))
        return PassResult(matched=len(sites), sites=sites, near_misses=misses)

    return _with(passes, run)


def pass_greedy(passes: Passes) -> Passes:
    """Read the cap where x is divided by it, and not compare it with what the product is taken with."""

    def find_greedily(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
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

    return _with(passes, lambda context: fuse(context, find_greedily))


def pass_drops_write(passes: Passes) -> Passes:
    """Tidy up after the fusion as if a call without users did nothing."""

    def run(context: PassContext) -> PassResult:
        result = fuse_softcap(context)
        for node in reversed(context.graph.nodes):
            if node.op in ("call_function", "call_method") and not node.users:
                context.graph.erase_node(node)
        return result

    return _with(passes, run)
