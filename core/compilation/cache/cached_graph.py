"""`CachedGraph`: a finished graph of a phase, as the compile cache keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from core.compilation.capture.alike import Cut
from core.compilation.report import TraceReport
from core.compilation.trace.traced import ConstantSlot, TracedGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedGraph:
    """A graph as a phase runs it, with its account. breaks: the number of places where a piecewise mode cuts it.

    contents: tensors whose content a pass may have read. sourceless: names of the tensors that passes added with
    unknown sources.
    """

    traced: TracedGraph
    report: TraceReport
    breaks: int
    #: Where it is cut to be compiled in two parts.
    cut: Cut | None = None
    contents: tuple[Tensor, ...] = ()
    sourceless: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The constants of the graph."""
        found = (slot.value for slot in self.traced.slots if isinstance(slot, ConstantSlot))
        return tuple(value for value in found if isinstance(value, Tensor))
