"""Fix functionalisation: let a functional graph write in place again, with a copy only where an old value is needed.

The counterpart of core/compilation/rewrite/functional.py, and good for any functional ATen graph: what an op writes
is read off its schema, never off its name.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import fx

from core.common.passes import NearMiss, Pass, PassContext, PassResult, PassTraits, near_miss, remove_dead
from core.common.passes.functional.calls import renew_views, rewrite_updates
from core.common.passes.functional.plan import plan_updates

log = logging.getLogger("core.passes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reinplaced:
    """The outcome for a graph's updates. functionalized: how many there were. sites: of the updates that now run in
    place.

    clones: the copies that remain, each with its reason: a clone of a value before the op that writes it, or an update
    that still returns its result in new memory. num_moved: nodes that read an old value, moved before its update.
    """

    functionalized: int
    sites: tuple[str, ...]
    clones: tuple[NearMiss, ...]
    num_moved: int

    def summary(self) -> str:
        """Return the counts in one line."""
        return (
            f"{self.functionalized} updates functionalised, {len(self.sites)} in place again, "
            f"{len(self.clones)} copies kept, {self.num_moved} nodes moved before an update"
        )


def reinplace(module: fx.GraphModule, *, move_readers: bool = True) -> Reinplaced:
    """Let every update of a functional ATen graph run in place, with a copy where its old value is still needed.

    module: a graph of ATen and custom ops with fake values (`meta["val"]`), functionalised by AOTAutograd, Inductor or
    `to_functional`; changed in place and recompiled. An input is written only if the graph copies a value into it.
    move_readers: move the readers of an old value before its update instead of copying the value. Not for a graph that
    Inductor is about to lower: it may compute such a read after the op's write (torch 2.13, and 2.11).
    """
    renew_views(module.graph)  # passes may not have updated the fake values of a replaced node's views
    plan = plan_updates(module, move_readers=move_readers)
    misses = tuple(near_miss(node, reason) for node, reason in plan.kept)
    sites = rewrite_updates(module.graph, plan)
    remaining = {miss.node for miss in misses} & {node.name for node in module.graph.nodes}
    remove_dead(module.graph)
    module.recompile()
    return Reinplaced(
        functionalized=len(sites) + len(remaining), sites=tuple(sites), clones=misses, num_moved=plan.moved
    )


def run(context: PassContext) -> PassResult:
    """Let what functionalisation made a copy of be written in place, but where the old value is needed."""
    done = reinplace(context.module, move_readers=context.params["move_readers"] is True)
    log.info("pass %s: %s", context.name, done.summary())
    return PassResult(matched=len(done.sites), sites=done.sites, near_misses=done.clones)


FIX_FUNCTIONALIZATION = Pass(
    name="fix_functionalization",
    does="Let what functionalisation made a copy of be written in place, but where the old value is needed.",
    run=run,
    stage="functional",
    params={"move_readers": True},
    traits=PassTraits(closes=True, reads_content=False),
)
