"""State that the passes of one run over one graph share, and the types of their observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.common.passes.context import Analyses
from core.common.passes.pass_guards import Stage
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot

if TYPE_CHECKING:
    from torch import fx

    from core.common.passes.constants import Constants

Check = Callable[[PassReport, "fx.GraphModule", "fx.GraphModule"], str | None]
"""Called with a pass's report and the graph before and after it; raises `PassError` where the rewrite is wrong.

Returns why it could not be judged, "" where it was, None to leave that out of the report."""
Observer = Callable[[PassReport, Snapshot, "fx.GraphModule"], None]
"""Called with the report of a pass that changed the graph, and the graph before and after; changes nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """State that the passes of one run over one graph share. changed: names of those that changed it so far."""

    graph: fx.GraphModule
    stage: Stage
    tokens: tuple[int, int] | None
    sizes: tuple[Mapping[Any, int], ...]
    constants: Constants | None
    check: Check | None
    observe: Observer | None
    analyses: Analyses
    changed: list[str]

    @property
    def num_constants(self) -> int:
        """How many constants the passes so far have added."""
        return 0 if self.constants is None else len(self.constants.added)
