"""The graphs of a model's phases with inputs to run them on: what `explain` shows and `bisect` searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.common.traced import TracedGraph
from core.common.tracing import trace
from core.engine.static_cache import StaticPhase, static_phases
from core.errors import ModelError, TraceError

if TYPE_CHECKING:
    from core.device import Device
    from core.engine.loading import LoadedModel

PHASES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseGraph:
    """One traced phase. examples: inputs by name that the trace serves, at least one set; the first was traced.

    function: the model's own, which was traced; it writes the caches.
    """

    phase: str
    traced: TracedGraph
    examples: tuple[Mapping[str, Tensor], ...]
    function: Callable[..., Any] | None = None

    def values(self) -> list[tuple[Any, ...]]:
        """Return the graph's placeholder values for each set of examples; weights and caches are the model's own."""
        return [self.traced.values(inputs) for inputs in self.examples]


def phase_graphs(loaded: LoadedModel, device: Device, *, phases: Sequence[str] = PHASES) -> tuple[PhaseGraph, ...]:
    """Trace a model's prefill, at any number of tokens, and decode, on transformers' static cache.

    loaded: a model on `device`; it runs eagerly to fill the caches. Raises `ModelError` where transformers has no
    static cache for the model and `TraceError` where a phase is not one graph.
    """
    with torch.inference_mode(False):
        try:
            return tuple(_trace(phase) for phase in _static_phases(loaded, device) if phase.name in phases)
        except TraceError:
            try:
                found = static_phases(loaded.model, masked=True)
                return tuple(_trace(phase) for phase in found if phase.name in phases)
            except Exception:  # the error of the plain form is told; this was an attempt
                pass
            raise


def _static_phases(loaded: LoadedModel, device: Device) -> tuple[StaticPhase, ...]:
    try:
        return static_phases(loaded.model)
    except Exception as error:  # any model's code runs in there
        text = " ".join(str(error).split())
        raise ModelError(
            f"running {type(loaded.model).__name__} on a static cache on {device.name}",
            found=f"{type(error).__name__}: {text}",
            remedy="choose a model whose generation transformers supports with a static cache",
        ) from error


def _trace(phase: StaticPhase) -> PhaseGraph:
    # Tracing marks dimensions on the tensors it is given: hand it aliases.
    aliases = {name: tensor.view(tensor.shape) for name, tensor in phase.inputs.items()}
    traced = trace(phase.function, aliases, dynamic=phase.dynamic)
    others = [] if traced.holds_for(other := _other(phase)) else [other]
    return PhaseGraph(phase=phase.name, traced=traced, examples=(phase.inputs, *others), function=phase.function)


def _other(phase: StaticPhase) -> Mapping[str, Tensor]:
    """Return a second set of inputs: the sequences in another order, and fewer tokens where their number is free."""
    inputs = {name: tensor.flip(0) for name, tensor in phase.inputs.items()}
    return {
        name: tensor[:, : max(2, tensor.shape[1] - 2)].contiguous() if phase.dynamic.get(name) else tensor
        for name, tensor in inputs.items()
    }
