"""The phases of the paged route: what tells them apart, their buckets, and how they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from core.capabilities import Capabilities
from core.compilation.capture.inputs import InputSpec
from core.compilation.options import CompileOptions
from core.compilation.request import TRACED_MODES
from core.compilation.shared_trace import SharedTrace
from core.engine.static.cache import CachedPhase
from core.engine.steps.runner import EngineConfig

Buckets = dict[str, list[dict[str, int]]]
"""The sizes of each phase's buckets."""


def query_lens(num_drafts: int) -> dict[str, int]:
    """Return for each phase the most tokens of a sequence in a step, 0 for any: the op may skip its general form.

    Without recurrent states nothing else differs between the phases' calls.
    """
    return {"decode": 1, "prefill": 0} | ({"verify": 1 + num_drafts} if num_drafts else {})


def buckets(
    config: EngineConfig, capabilities: Capabilities, lens: Mapping[str, int], prefill: Sequence[int], *, drafts: bool
) -> Buckets:
    """Return the buckets of each phase. lens: as of `query_lens`. prefill: numbers of tokens. drafts: of a draft model,
    which catches up in "verify", and chooses one token each there."""
    sizes, seqs, width = config.decode_sizes(capabilities), config.max_num_seqs, lens.get("verify", 1)
    rows = 1 if drafts else width
    found = {
        "decode": [{"tokens": size, "seqs": size, "rows": size} for size in sizes],
        "prefill": [{"tokens": size, "seqs": seqs, "rows": seqs} for size in prefill],
        "verify": [{"tokens": size * width, "seqs": size, "rows": size * rows} for size in sizes],
    }
    return {phase: found[phase] for phase in lens}


def options(
    config: EngineConfig,
    capabilities: Capabilities,
    lens: Mapping[str, int],
    *,
    packed: bool,
    apart: bool,
    reset: Callable[[], None] | None,
    **how: Any,
) -> CompileOptions:
    """Return how the phases are compiled.

    reset: brings recurrent states back; None for a model without. packed: whether its prompts may have graphs.
    apart: of `PagedCall.chooses_apart`.
    """
    how |= {"shared_guard": None} if apart else {}
    how |= {"outputs": [("rows",), ("rows", None)]}
    if reset is None:
        how["shared"] = SharedTrace(op="core::attention", argument="max_query_len", values=dict(lens))
        return config.compile_options(lens, capabilities, **how)
    found = config.compile_options(lens, capabilities, reset=reset, **how)
    # Without a trace, which tokens of a prompt belong together is known to the host alone.
    traced = TRACED_MODES if packed else ()
    modes = tuple(mode for mode in config.modes_of("prefill", capabilities) if mode in traced)
    return replace(found, mode={**cast("Mapping[str, Any]", found.mode), "prefill": (*modes, "off")})


def of_logits(
    functions: Mapping[str, Callable[..., Any]],
    declared: Mapping[str, InputSpec],
    examples: Mapping[str, Mapping[str, Tensor]],
) -> tuple[CachedPhase, ...]:
    """Return phases that compute logits alone. declared: their inputs, as `step_inputs` gives them."""
    inputs = {name: spec for name, spec in declared.items() if name != "sampling_params"}
    dynamic = {name: [d for d, size in enumerate(s.shape) if isinstance(size, str)] for name, s in inputs.items()}
    return tuple(
        CachedPhase(
            name=phase,
            function=function,
            inputs={name: examples[phase][name] for name in inputs},
            dynamic=dynamic,
        )
        for phase, function in functions.items()
    )


def has_graphs(program: Any, phase: str) -> bool:
    """Tell whether any graph of a program serves a phase: what could not be captured has been dropped, with a word."""
    return any(key.phase == phase for key in program.keys)
