"""The graphs of a model's phases with inputs to run them on: what `explain` shows and `bisect` searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.compilation.options import CompileOptions
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.engine.config import PHASES
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.probe import probe_tokens
from core.engine.paged.runner import PagedRunner
from core.engine.recompute.model import whole_inputs
from core.engine.recompute.opening import COST, open_whole
from core.engine.static.cache import CachedPhase, static_phases
from core.engine.static.model import open_static
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError, TraceError, UsageError

if TYPE_CHECKING:
    from core.device import Device
    from core.engine.models.loading import LoadedModel

_CONTEXT = 64  # tokens, of the paged cache that is traced: enough for the engine's own check


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseGraph:
    """One traced phase of a model."""

    phase: str
    traced: TracedGraph
    #: Sets of inputs by name that the trace serves, at least one; the first was traced.
    examples: tuple[Mapping[str, Tensor], ...]
    #: The model's own function, which was traced; it writes the caches.
    function: Callable[..., Any] | None = None
    #: Which cache, "paged" (with its dtype where that was asked for), "static", or "recompute" for none, and why.
    cache: str = ""

    def values(self) -> list[tuple[Any, ...]]:
        """Return the graph's placeholder values for each set of examples; weights and caches are the model's own."""
        return [self.traced.values(inputs) for inputs in self.examples]


@contextmanager
def engine_graphs(
    loaded: LoadedModel,
    device: Device,
    *,
    cache: str = "auto",
    phases: Sequence[str] = PHASES,
    kv_cache_dtype: str = "auto",
) -> Iterator[tuple[PhaseGraph, ...]]:
    """Trace a model's prefill and decode as the engine runs them; their functions work inside the context only.

    cache: "paged" or "static"; "auto" is the engine's choice, paged wherever it can be, and without a cache where
    neither can, then decode alone. kv_cache_dtype: as in `EngineConfig`; another than "auto" asks for the paged cache.
    Raises `UsageError` where paged is asked for and can't be, or static with a dtype of its own, and as `phase_graphs`.
    """
    if cache == "static" and kv_cache_dtype != "auto":
        raise UsageError(
            f"the graphs of {type(loaded.model).__name__} on the static cache, its dtype {kv_cache_dtype}",
            found=f"only a paged cache holds {kv_cache_dtype} codes",
            remedy="ask for cache 'paged', or leave its dtype to the model",
        )
    config = EngineConfig(max_num_seqs=2, kv_cache_dtype=kv_cache_dtype, options=CompileOptions(mode="off"))
    cache = "paged" if kv_cache_dtype != "auto" else cache
    length = min(loaded.max_position or _CONTEXT, _CONTEXT)
    runner = None
    reason = "asked for"
    if cache != "static":
        try:
            with torch.inference_mode(False):
                runner = PagedRunner(loaded.model, device, config, max_model_len=length)
        except NotPageable as error:
            reason = f"no paged cache: {error}"
            if cache == "paged":
                raise UsageError(
                    f"the graphs of {type(loaded.model).__name__} on the paged cache",
                    found=str(error),
                    remedy="ask for cache 'static', or leave the choice to the engine",
                ) from error
    if runner is None:
        manner, refused = _manner(loaded, device, length, reason.removeprefix("no paged cache: "))
        if refused and cache == "auto":
            yield (_whole_graph(loaded, device, length, refused, phases),)
            return
        found = phase_graphs(loaded, device, phases=phases)
        reason += f"; {manner}" if manner else ""
        reason += f"; the engine does not serve it: {refused}" if refused else ""
        yield tuple(replace(graph, cache=f"static: {reason}") for graph in found)
        return
    try:
        with torch.inference_mode(False):
            traced = [_trace(phase, _other_tokens(phase)) for phase in runner.phases() if phase.name in phases]
        kind = "paged" if kv_cache_dtype == "auto" else f"paged, {kv_cache_dtype} codes"
        yield tuple(replace(graph, cache=f"{kind}: {runner.reason}") for graph in traced)
    finally:
        runner.close()


def _manner(loaded: LoadedModel, device: Device, max_model_len: int, reason: str) -> tuple[str, str]:
    """Return how many sequences the engine serves at once on the static cache, by its defaults, or why it does not."""
    with torch.inference_mode(False):
        try:
            static = open_static(loaded.model, device, EngineConfig(), max_model_len=max_model_len, reason=reason)
        except ModelError as error:  # its graphs can be looked at all the same
            return "", error.found
        manner = static.manner
        static.close()
        return manner, ""


def _whole_graph(
    loaded: LoadedModel, device: Device, max_model_len: int, reason: str, phases: Sequence[str]
) -> PhaseGraph:
    """Trace the forward on whole sequences, as the engine runs a model without a cache. reason: why it has none."""
    name = type(loaded.model).__name__
    if "decode" not in phases:
        found = f"it has no cache ({reason}), and computes prompts as it decodes"
        raise UsageError(f"the graph of {phases[0]} of {name}", found=found, remedy="ask for decode")
    with torch.inference_mode(False):
        forward, manner, _ = open_whole(loaded.model, EngineConfig(), max_model_len=max_model_len, reason=reason)
        if not forward.way.traceable:
            raise ModelError(
                f"the graphs of {name}",
                found=f"it has none: {reason}; {manner}",
                remedy="core run serves it; core.compile takes its forward as it is",
            )
        sequences = [probe_tokens(loaded.model, length, 3 + length) for length in (7, 5)]
        inputs = whole_inputs(sequences, device.torch_device)
        phase = CachedPhase(name="decode", function=forward, inputs=inputs, dynamic={"input_ids": (1,)})
        return replace(_trace(phase, _other_tokens(phase)), cache=f"recompute: {reason}; {COST}; {manner}")


def phase_graphs(loaded: LoadedModel, device: Device, *, phases: Sequence[str] = PHASES) -> tuple[PhaseGraph, ...]:
    """Trace a model's prefill, at any number of tokens, and decode, on transformers' static cache.

    loaded: a model on `device`; it runs eagerly to fill the caches. Raises `ModelError` where transformers has no
    static cache for the model and `TraceError` where a phase is not one graph.
    """
    with torch.inference_mode(False):
        try:
            return tuple(_trace(p, _other(p)) for p in _static_phases(loaded, device) if p.name in phases)
        except TraceError:
            try:
                found = static_phases(loaded.model, masked=True)
                return tuple(_trace(p, _other(p)) for p in found if p.name in phases)
            except Exception:  # report the error of the plain form; this was only an attempt
                pass
            raise


def _static_phases(loaded: LoadedModel, device: Device) -> tuple[CachedPhase, ...]:
    try:
        return static_phases(loaded.model)
    except Exception as error:  # the model's code may raise anything
        text = " ".join(str(error).split())
        raise ModelError(
            f"running {type(loaded.model).__name__} on a static cache on {device.name}",
            found=f"{type(error).__name__}: {text}",
            remedy="choose a model whose generation transformers supports with a static cache",
        ) from error


def _trace(phase: CachedPhase, other: Mapping[str, Tensor]) -> PhaseGraph:
    # Tracing marks dimensions on the tensors it is given: hand it aliases.
    aliases = {name: tensor.view(tensor.shape) for name, tensor in phase.inputs.items()}
    traced = trace(phase.function, aliases, dynamic=phase.dynamic)
    others = [] if traced.why_not_for(other) else [other]
    return PhaseGraph(phase=phase.name, traced=traced, examples=(phase.inputs, *others), function=phase.function)


def _other_tokens(phase: CachedPhase) -> Mapping[str, Tensor]:
    """Return a second set of inputs: same positions, slots and lengths, other tokens."""
    return {**phase.inputs, "input_ids": phase.inputs["input_ids"].flip(0)}


def _other(phase: CachedPhase) -> Mapping[str, Tensor]:
    """Return a second set of inputs: the sequences in another order, and fewer tokens where their number is free."""
    inputs = {name: tensor.flip(0) for name, tensor in phase.inputs.items()}
    return {
        name: tensor[:, : max(2, tensor.shape[1] - 2)].contiguous() if phase.dynamic.get(name) else tensor
        for name, tensor in inputs.items()
    }
