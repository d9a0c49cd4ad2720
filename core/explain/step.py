"""One step of a model at a given size, traced: what `explain --kernels` runs node by node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.compilation.options import CompileOptions
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.engine.check.graphs import engine_graphs
from core.engine.config import PHASES, SamplingParams
from core.engine.inspect.attention import NotPageable
from core.engine.paged.call import PagedCall
from core.engine.paged.runner import PagedRunner
from core.engine.static.cache import CachedPhase
from core.engine.steps.inputs import step_tensors
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sampling import GREEDY_ROW
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Part, Step
from core.errors import UsageError

if TYPE_CHECKING:
    from core.device import Device
    from core.engine.models.loading import LoadedModel

_SMALL = 32  # token ids below this are in every vocabulary
_ROOM = 2  # tokens behind the context: the one computed, and the one that follows


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGraph:
    """A traced step, with what one run of it takes."""

    traced: TracedGraph
    inputs: Mapping[str, Tensor]
    #: Number of sequences.
    batch: int
    #: Number of tokens that each sequence holds, or that the prompt has.
    tokens: int
    #: Number of tokens that the step computes.
    num_tokens: int
    cache: str
    notes: tuple[str, ...] = ()


@contextmanager
def step_graph(
    loaded: LoadedModel,
    device: Device,
    phase: str,
    *,
    batch: int = 1,
    tokens: int = 1024,
    kv_cache_dtype: str = "auto",
) -> Iterator[StepGraph]:
    """Trace a step as the engine runs it, with the choice of tokens; valid inside of the context only.

    phase: "decode", of `batch` sequences that hold `tokens` each, or "prefill", of one prompt of `tokens`. The cache
    holds zeros, in the dtype that `EngineConfig` names so. A model without a paged cache is shown as `engine_graphs`
    does, at its sizes, with a note. Raises `UsageError` for sizes that the model does not have, and for a
    cache of codes where it has no paged one.
    """
    _check(loaded, phase, batch, tokens)
    batch = batch if phase == "decode" else 1
    length = tokens + _ROOM if loaded.max_position is None else min(tokens + _ROOM, loaded.max_position)
    config = EngineConfig(
        max_num_seqs=batch,
        max_step_tokens=max(tokens, batch) if phase == "prefill" else None,
        prefix_caching=False,
        kv_cache_dtype=kv_cache_dtype,
        options=CompileOptions(mode="off"),
    )
    try:
        with torch.inference_mode(False):
            runner = PagedRunner(loaded.model, device, config, max_model_len=length)
    except NotPageable as error:
        if kv_cache_dtype != "auto":
            raise UsageError(
                f"the kernels of {type(loaded.model).__name__} on a paged cache of {kv_cache_dtype} codes",
                found=str(error),
                remedy="leave the cache's dtype to the model",
            ) from error
        with engine_graphs(loaded, device, phases=(phase,)) as (graph,):
            ids = graph.examples[0]["input_ids"]
            cache, _, why = graph.cache.partition(": ")
            yield StepGraph(
                traced=graph.traced,
                inputs=graph.examples[0],
                batch=ids.shape[0],
                tokens=ids.shape[1],
                num_tokens=ids.numel(),
                cache=cache,
                notes=(f"{why}; shown at {ids.shape[0]} sequences of {ids.shape[1]} tokens",),
            )
        return
    try:
        found = next(each for each in runner.phases() if each.name == phase)
        inputs = _inputs(runner, device, config.block_size, length, phase, batch, tokens)
        with torch.inference_mode(False):
            traced = _trace(found, inputs)
        yield StepGraph(
            traced=traced,
            inputs=inputs,
            batch=batch,
            tokens=tokens,
            num_tokens=batch if phase == "decode" else tokens,
            cache="paged",
            notes=() if kv_cache_dtype == "auto" else (f"the cache holds {kv_cache_dtype} codes",),
        )
    finally:
        runner.close()


def _check(loaded: LoadedModel, phase: str, batch: int, tokens: int) -> None:
    if phase not in PHASES:
        raise UsageError(f"the kernels of {phase!r}", found=f"the phases are {', '.join(PHASES)}", remedy="name one")
    if batch < 1 or tokens < 1:
        asked = f"a step of {batch} sequences with {tokens} tokens"
        raise UsageError(asked, found="there is nothing below 1", remedy="pass whole numbers of at least 1")
    needed = tokens + (1 if phase == "decode" else 0)
    if loaded.max_position is not None and needed > loaded.max_position:
        raise UsageError(
            f"a context of {tokens} tokens",
            found=f"the model has {loaded.max_position} positions, the step takes {needed}",
            remedy="ask for a shorter context",
        )


def _inputs(
    runner: PagedRunner, device: Device, block_size: int, length: int, phase: str, batch: int, tokens: int
) -> dict[str, Tensor]:
    params = SamplingParams(max_new_tokens=max(1, length - tokens))
    parts = []
    for index in range(batch):
        prompt = [(3 + 7 * place + index) % _SMALL for place in range(tokens)]
        sequence = Sequence(index, prompt, params)
        if not _fill(runner, sequence, block_size, 0 if phase == "prefill" else tokens):
            raise UsageError(
                f"the kernels of a step of {batch} sequences with {tokens} tokens",
                found=f"the device's memory has room for a cache of {index} of them",
                remedy="ask for fewer sequences or a shorter context",
            )
        parts.append(Part(sequence, 1 if phase == "decode" else tokens))
    step = Step("decode" if phase == "decode" else "prefill", tuple(parts))
    tensors = step_tensors(
        step,
        max_blocks=-(-length // block_size),
        block_size=block_size,
        device=device.torch_device,
        groups=runner.groups,
        recurrent=runner.cache.keeps_states,
    )
    rows = torch.tensor([GREEDY_ROW] * batch, dtype=torch.float32).to(device.torch_device)
    return {**tensors, "sampling_params": rows}


def _fill(runner: PagedRunner, sequence: Sequence, block_size: int, tokens: int) -> bool:
    """Have the cache hold so many tokens of a prompt, and blocks for the next step; False without room for them.

    Block by block, as layers with a window have room for no more of them than the window needs.
    """
    if not runner.cache.join(sequence):
        return False
    if tokens:
        sequence.generated = [sequence.index % _SMALL]  # of one token all would choose the same experts
    for start in range(0, tokens, block_size):
        held = min(start + block_size, tokens)
        if not runner.cache.grow(sequence, held):
            return False
        sequence.num_computed = sequence.num_settled = held
        runner.cache.settle(sequence)
    return runner.cache.grow(sequence, len(sequence))


def _trace(phase: CachedPhase, inputs: Mapping[str, Tensor]) -> TracedGraph:
    function = PagedCall(phase.function)  # type: ignore[arg-type]  # the phase of a paged runner is a `PagedLogits`
    aliases = {name: tensor.clone() for name, tensor in inputs.items()}
    return trace(function, aliases, dynamic=phase.dynamic, constants={"sampling": "greedy"})
