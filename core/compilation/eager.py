"""Eager runs of a program's models, if the mode is "off" or no graph may serve a call."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.compilation.training import Evaluated

if TYPE_CHECKING:
    from core.compilation.calls import Calls
    from core.compilation.capture.runner import GraphRunner
    from core.compilation.oversized import Eager
    from core.compilation.request import CompileRequest

log = logging.getLogger("core.compilation.program")


class EagerRuns:
    """The models of a program's phases, run eagerly and counted."""

    def __init__(self, request: CompileRequest, calls: Calls, runner: GraphRunner) -> None:
        """runner: counts, in `fallbacks`, the runs that had no graph."""
        self._models = dict(request.models)
        self._evaluated = {phase: Evaluated(model) for phase, model in request.models.items()}
        self._device = request.device.torch_device
        self._calls = calls
        self._runner = runner

    def run(self, phase: str, guards: Mapping[str, Hashable], inputs: Mapping[str, Tensor], why: Eager) -> Any:
        """Run the phase's model; raise `UsageError` if it has been put into training mode."""
        sizes, reason, runner = self._calls.measure(inputs), why.reason, self._runner
        self._calls.check_dtypes(inputs)
        self._evaluated[phase].check(phase)
        if reason:
            if reason not in runner.fallbacks:
                log.warning("%s runs eagerly with %s: %s", phase, sizes, reason)
            runner.fallbacks[reason] += 1
        if why.oversized:
            runner.oversized[f"{reason}: run eagerly"] += 1
        with torch.no_grad():
            # A captured call accepts inputs on any device, so move them here; `to` returns tensors already there as
            # they are.
            own = {name: tensor.to(self._device) for name, tensor in inputs.items()}
            result = self._models[phase](**{**self._calls.bound, **own}, **guards)
        runner.compiles.raise_pending()
        return result

    def close(self) -> None:
        """Let go of the models."""
        self._models.clear()
        self._evaluated.clear()
