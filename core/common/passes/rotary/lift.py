"""Lift rotary embedding, however it is spelled, to `core::rotary` or, for one tensor alone, `core::rotary_single`.

Every rotation is read on its own (form.py); two by equal tables become one op (pairs.py). The op is the
same arithmetic and changes no bit, but for complex products, whose sums may be contracted: those keep criterion T1.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from core.common.ops.rotary import ROTARY, ROTARY_SINGLE
from core.common.passes import NearMiss, Pass, PassContext, PassResult, Site, apply_sites, near_miss
from core.common.passes.rotary.features import Table
from core.common.passes.rotary.form import Rotation, find_rotation, is_seed
from core.common.passes.rotary.pairs import pair_up


def find_rotations(context: PassContext) -> tuple[list[Rotation], list[NearMiss]]:
    """Return all rotations of the graph in order of their results, and the near-misses."""
    order: Mapping[fx.Node, int] = context.analysis("order")
    found: dict[fx.Node, Rotation] = {}
    misses: dict[fx.Node, NearMiss] = {}
    read: set[fx.Node] = set()
    for node in context.graph.nodes:
        if node in read or not is_seed(node):
            continue
        rotation = find_rotation(node, order)
        if isinstance(rotation, Rotation):
            found[rotation.result] = rotation
            read.update(rotation.nodes)
        elif rotation is not None:
            misses[node] = rotation
    missed = [miss for node, miss in misses.items() if node not in read]
    return sorted(found.values(), key=lambda rotation: order[rotation.result]), missed


def _site(*rotations: Rotation) -> Site:
    """Return the site of one rotation or of a query's and a key's."""
    first = rotations[0]
    tables = dict.fromkeys((first.cos, first.sin))
    options: dict[str, Any] = {
        "style": first.style,
        "rotary_dim": first.rotary_dim,
        "compute_dtype": first.compute_dtype,
    }
    if first.out_dtype is not None:
        options["out_dtype"] = first.out_dtype
    inputs = tuple(rotation.x for rotation in rotations)
    results = tuple(rotation.result for rotation in rotations)
    target = ROTARY.overload if len(rotations) == 2 else ROTARY_SINGLE.overload
    interior = tuple(dict.fromkeys(node for rotation in rotations for node in rotation.nodes))
    if first.backward or any(part for _, part in tables):
        nodes = tuple(dict.fromkeys(node for node, _ in tables))
        return Site(
            anchor=results[0],
            target=_with_tables(target, len(inputs), first, options),
            args=(*inputs, *nodes),
            interior=interior,
            outputs=results,
        )
    return Site(
        anchor=results[0],
        target=target,
        args=(*inputs, first.cos[0], first.sin[0]),
        kwargs=options,
        interior=interior,
        outputs=results,
    )


def _with_tables(target: Any, count: int, rotation: Rotation, options: Mapping[str, Any]) -> fx.GraphModule:
    """Return a graph of the op and, before it, the tables it needs: parts of a complex one, or a negated sine."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x_{index}") for index in range(count)]
    sources = dict.fromkeys(node for node, _ in (rotation.cos, rotation.sin))
    holders = {node: graph.placeholder(f"table_{index}") for index, node in enumerate(sources)}
    reals: dict[fx.Node, fx.Node] = {}

    def table(wanted: Table) -> fx.Node:
        node, part = wanted
        if not part:
            return holders[node]
        if node not in reals:
            reals[node] = graph.call_function(torch.view_as_real, (holders[node],))
        return graph.call_function(torch.select, (reals[node], -1, int(part == "imag")))

    cos, sin = table(rotation.cos), table(rotation.sin)
    if rotation.backward:
        sin = graph.call_function(torch.neg, (sin,))
    result = graph.call_function(target, (*inputs, cos, sin), dict(options))
    pair = count > 1 and tuple(graph.call_function(operator.getitem, (result, index)) for index in range(count))
    graph.output(pair or result)
    return fx.GraphModule(torch.nn.Module(), graph)


def run(context: PassContext) -> PassResult:
    """Lift every rotation of the graph, a query's and its key's together."""
    rotations, misses = find_rotations(context)
    sites = [_site(*group) for group in pair_up(context, rotations)]
    refused = [miss for site in sites if (miss := _irreversible(context, site)) is not None]
    kept = [site for site in sites if _irreversible(context, site) is None]
    return apply_sites(context, kept, (*misses, *refused))


def _irreversible(context: PassContext, site: Site) -> NearMiss | None:
    """Refuse tables that the site must prepare, on a device without the op: it would run the reference.

    Such a site can't be put back as the model wrote it. The reference's result may have another layout, in which
    products may round differently.
    """
    if context.implemented is None or not isinstance(site.target, fx.GraphModule):
        return None
    op = ROTARY if len(site.outputs) == 2 else ROTARY_SINGLE
    if op.qualified_name in context.implemented:
        return None
    return near_miss(site.anchor, f"the device does not implement {op.qualified_name}, and this form can't be put back")


LIFT_ROTARY = Pass(
    name="lift_rotary", does="Lift every rotation of the graph, a query's and its key's together.", run=run
)
