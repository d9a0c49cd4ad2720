"""What the passes begin with that lay constants of a graph end to end: `merge_linears` and `merge_lora`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from core.common.passes import NearMiss, PassContext, PassResult, Writes
from core.common.passes.cleanup.relayout import Relayout
from core.common.passes.packing import Owners


class Joiner:
    """Rewrites the sites of one graph one by one, so that each frees the memory of its constants before the next."""

    def __init__(self, context: PassContext) -> None:
        """context: of a pass whose guard asks for constants."""
        assert context.constants is not None
        self._context, self._constants = context, context.constants
        self._writes: Writes = context.analysis("writes")
        self._order: Mapping[fx.Node, int] = context.analysis("order")
        self._relayout = Relayout(self._order)
        self._owners = Owners(self._constants.tensors())
        #: The memory of what the graph returns.
        self._returned = self._writes.of(*context.graph.output_node().all_input_nodes)
        self.sites: list[str] = []
        self.misses: list[NearMiss] = []

    def result(self) -> PassResult:
        """Return what was joined, and why the rest was not."""
        return PassResult(matched=len(self.sites), sites=tuple(self.sites), near_misses=tuple(self.misses))
