"""The models of open engines: each has one engine at most, which changes its attention."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

from core.errors import UsageError

SERVED: WeakSet[nn.Module] = WeakSet()


def refuse_served(model: nn.Module) -> None:
    """Raise `UsageError` for a model that an open engine has."""
    if model in SERVED:
        raise UsageError(
            f"an engine for {type(model).__name__}",
            found="the model is served by another engine",
            remedy="close that one first, or load the model once more",
        )
