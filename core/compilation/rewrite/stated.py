"""Whether passes have made ops of all that a graph states and does not compute."""

from __future__ import annotations

from torch import fx

from core.common.ops.recurrent.tokens import first_stated
from core.common.passes.sites import site_name
from core.errors import TraceError


def check_runnable(phase: str, module: fx.GraphModule) -> None:
    """Raise `TraceError` where passes left a recurrence that the graph states and does not compute."""
    node = first_stated(module.graph)
    if node is not None:
        error = TraceError(
            f"tracing {phase}",
            found=f"{site_name(node)} keeps a state along the tokens of a sequence, and no enabled pass makes an op of "
            "what it computes",
            remedy="enable the passes that lift such ops, or run this phase with mode 'off' (eager)",
        )
        error.states_recurrence = True
        raise error
