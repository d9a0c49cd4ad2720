"""Training mode: it must neither be captured nor be used in eager runs beside graphs captured in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from core.errors import UsageError


def check_training_mode(model: Callable[..., Any]) -> None:
    """Refuse a model that would drop out or update statistics: what training mode does must not be captured."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    training = [type(m).__name__ for m in modules if m.training and isinstance(m, layers)]
    if training:
        raise UsageError(
            f"compiling {type(model).__name__}",
            found=f"{training[0]} in it is in training mode",
            remedy="call model.eval() first",
        )


class Evaluated:
    """The modules of a model that were in evaluation mode when it was compiled.

    Graphs keep doing what evaluation mode does. A module that was switched since may do something else in an eager run:
    it may drop out by a function, which no list of layers would tell.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        """model: with or without modules in it."""
        named = model.named_modules() if isinstance(model, nn.Module) else ()
        self._name = type(model).__name__
        self._modules = [(name, module) for name, module in named if not module.training]

    def check(self, phase: str) -> None:
        """Raise `UsageError` where one of them is in training mode now."""
        for name, module in self._modules:
            if module.training:
                raise UsageError(
                    f"running phase {phase!r} of {self._name} eagerly",
                    found=f"{name or 'the model'} was put in training mode after it was compiled in evaluation mode; "
                    "captured calls still compute what that mode does",
                    remedy="call model.eval() again; to train, compile a copy of the model",
                )
