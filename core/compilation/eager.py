"""Eager runs of a program: its models as they are, where the mode says so or no graph may serve a call."""

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
    """The models of a program's phases, run as they are, with the counts of it."""

    def __init__(self, request: CompileRequest, calls: Calls, runner: GraphRunner) -> None:
        """runner: counts the runs for want of a graph, in its `fallbacks`."""
        self._models = dict(request.models)
        self._evaluated = {phase: Evaluated(model) for phase, model in request.models.items()}
        self._device = request.device.torch_device
        self._calls = calls
        self._runner = runner

    def run(self, phase: str, guards: Mapping[str, Hashable], inputs: Mapping[str, Tensor], why: Eager) -> Any:
        """Return what the phase's model does; raise `UsageError` where it was put in training mode since."""
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
            # A captured call copies inputs into buffers, wherever these lie; `to` gives those in place themselves.
            own = {name: tensor.to(self._device) for name, tensor in inputs.items()}
            result = self._models[phase](**{**self._calls.bound, **own}, **guards)
        runner.compiles.raise_pending()
        return result

    def close(self) -> None:
        """Let go of the models."""
        self._models.clear()
        self._evaluated.clear()
