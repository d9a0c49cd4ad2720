"""Running a transformers model on the paged cache: bucketed programs for decode and prefill, one shared cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.common.report import ProgramReport
from core.compilation import Progress, compile
from core.device import Device
from core.engine.attention import SERVE, AttentionLayer, NotPageable, StepTensors, inspect, set_implementation
from core.engine.cache import BlockPool, PagedCache
from core.engine.config import SamplingParams
from core.engine.masks import EXHAUSTIVE
from core.engine.probe import (
    counts_from_zero,
    depends_on_longest,
    largest_difference,
    own_logits,
    probe_sequences,
    rounding_bound,
)
from core.engine.runner import EngineConfig, accepted_arguments, powers
from core.engine.sequence import Sequence as EngineSequence
from core.engine.sequence import step_inputs, step_tensors
from core.engine.static_cache import CachedPhase
from core.errors import ModelError


class PagedCall:
    """The function that is compiled: one step of the model over flattened tokens, for one phase."""

    def __init__(self, model: Any, step: StepTensors, max_query_len: int) -> None:
        self._model = model
        self._step = step
        self._max_query_len = max_query_len
        self._selects_rows = "logits_to_keep" in accepted_arguments(model)

    def __repr__(self) -> str:
        return type(self._model).__name__  # stands in reports and errors of tracing

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
        logit_rows: Tensor,
    ) -> Tensor:
        """Return logits (seqs, vocabulary) of each sequence's last token; shapes as in `step_inputs`."""
        step = self._step
        step.block_table, step.slot_mapping = block_table, slot_mapping
        step.seq_lens, step.query_starts, step.max_query_len = seq_lens, query_starts, self._max_query_len
        arguments = {"logits_to_keep": logit_rows} if self._selects_rows else {}
        output = self._model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, return_dict=True, **arguments
        )
        step.clear()
        logits: Tensor = output.logits[0]
        return logits if self._selects_rows else logits[logit_rows]


class PagedRunner:
    """A `ModelRunner` whose keys and values live in `core::attention`'s paged cache."""

    route = "paged"

    def __init__(
        self, model: Any, device: Device, config: EngineConfig, *, max_model_len: int, progress: Progress | None = None
    ) -> None:
        """Inspect the model, allocate the cache, check one short generation, and compile; or raise `NotPageable`."""
        self._model = model
        self._device = device
        self._block_size = config.block_size
        self._max_blocks = -(-max_model_len // config.block_size)
        self.max_num_seqs = config.max_num_seqs
        self._closed = False
        layers = self._inspect(max_model_len)
        num_blocks = 1 + config.max_num_seqs * self._max_blocks
        self._check_memory(layers.values(), num_blocks)
        self._before = model.config._attn_implementation
        self._cache = PagedCache(
            layers, num_blocks=num_blocks, block_size=config.block_size, device=device.torch_device
        )
        self._pool = BlockPool(num_blocks)
        self._examples: dict[str, list[dict[str, Tensor]]] = {}
        self._program: Any = None
        try:
            self._check_same_function(max_model_len)
            buckets = self._buckets(config, max_model_len)
            self.max_prefill_tokens = max(b["tokens"] for b in buckets["prefill"])
            self._program = compile(
                self._calls(),
                device,
                inputs=step_inputs(self._max_blocks),
                buckets=buckets,
                mode=config.mode,
                lowering=config.lowering,
                passes=config.passes,
                disable_passes=config.disable_passes,
                enable_passes=config.enable_passes,
                strict=config.strict,
                verify=config.verify,
                examples=self._examples,
                progress=progress,
            )
        except BaseException:
            self.close()
            raise

    def admit(self, sequence: EngineSequence) -> bool:
        """Reserve blocks for the prompt and everything that may be generated from it."""
        needed = -(-(len(sequence.prompt) + sequence.params.max_new_tokens) // self._block_size)
        needed = min(needed, self._max_blocks)
        if needed > self._pool.num_free:
            return False
        sequence.blocks = self._pool.take(needed)
        return True

    def run(self, phase: str, sequences: Sequence[EngineSequence]) -> Tensor:
        """Compute all pending tokens; logits (len(sequences), vocabulary), valid until the next call."""
        try:
            logits: Tensor = self._program(phase, **self._tensors(sequences))
        finally:
            self._cache.step.clear()  # an interrupted step must not serve a later call of the model
        for sequence in sequences:
            sequence.num_computed = len(sequence)
        return logits

    def release(self, sequence: EngineSequence) -> None:
        """Return the sequence's blocks."""
        # In this order, an interrupt in between can't hand blocks out twice.
        blocks, sequence.blocks = sequence.blocks, []
        self._pool.give_back(blocks)

    def report(self) -> ProgramReport:
        """Return the account of the compiled program."""
        report: ProgramReport = self._program.report()
        return report

    def close(self) -> None:
        """Free graphs and cache and give the model its own attention back; the second time, do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._program is not None:
            self._program.close()
        self._cache.close()
        self._model.set_attn_implementation(self._before)

    def phases(self) -> tuple[CachedPhase, ...]:
        """Return prefill and decode as they are compiled, with the inputs of the self-check; valid until `close`."""
        calls, inputs = self._calls(), step_inputs(self._max_blocks)
        dynamic = {name: [d for d, size in enumerate(s.shape) if isinstance(size, str)] for name, s in inputs.items()}
        return tuple(
            CachedPhase(name=name, function=calls[name], inputs=self._examples[name][0], dynamic=dynamic)
            for name in ("prefill", "decode")
        )

    def _inspect(self, max_model_len: int) -> dict[nn.Module, AttentionLayer]:
        mixed = depends_on_longest(self._model.config, max_model_len)
        if mixed:
            raise NotPageable(mixed)
        layers = inspect(self._model, max_len=max_model_len)
        self.reason = f"all {len(layers)} attention layers go through transformers' attention interface"
        if max_model_len > EXHAUSTIVE:
            self.reason += f"; masks compared on sampled rows, as the context is longer than {EXHAUSTIVE}"
        return layers

    def _tensors(self, sequences: Sequence[EngineSequence]) -> dict[str, Tensor]:
        return step_tensors(
            sequences,
            max_blocks=self._max_blocks,
            block_size=self._block_size,
            device=self._device.torch_device,
        )

    def _calls(self) -> dict[str, Callable[..., Tensor]]:
        # Exactly one token per sequence in decode: the op may then skip its general form.
        return {
            "decode": PagedCall(self._model, self._cache.step, 1),
            "prefill": PagedCall(self._model, self._cache.step, 0),
        }

    def _buckets(self, config: EngineConfig, max_model_len: int) -> dict[str, list[dict[str, int]]]:
        decode = config.decode_buckets or powers(1, config.max_num_seqs, 2)
        prefill = config.prefill_buckets or powers(32, max_model_len, 4)
        return {
            "decode": [{"tokens": size, "seqs": size} for size in decode],
            "prefill": [{"tokens": size, "seqs": config.max_num_seqs} for size in prefill],
        }

    def _check_memory(self, layers: Any, num_blocks: int) -> None:
        wanted = sum(num_blocks * self._block_size * layer.bytes_per_position for layer in layers)
        memory = self._device.parts.memory()
        if wanted > memory.total_bytes - memory.used_bytes:
            raise ModelError(
                f"a key/value cache of {wanted / 2**30:.2f} GiB ({self.max_num_seqs} sequences of up to "
                f"{self._max_blocks * self._block_size} tokens)",
                found=f"{self._device.name} has {(memory.total_bytes - memory.used_bytes) / 2**30:.2f} GiB free",
                remedy="lower max_num_seqs or max_model_len",
            )

    @torch.no_grad()
    def _check_same_function(self, max_model_len: int) -> None:
        """Compare a prefill and one decode step with the model's own forward; raise `NotPageable` if they differ.

        This finds models that keep state outside attention (recurrent layers, shared caches), and those whose
        sequences see each other: a long and a short one share both steps, and each is compared with itself alone.
        """
        if not counts_from_zero(self._model):
            raise NotPageable("it takes no position_ids, or counts otherwise than 0, 1, 2, …")
        probes = probe_sequences(self._model, max_model_len=max_model_len, max_num_seqs=self.max_num_seqs)
        expected = own_logits(self._model, probes)
        bound = rounding_bound(self._model, probes, expected)
        set_implementation(self._model, SERVE)
        difference = largest_difference(self._run_probes(probes), expected)
        if not difference <= bound:
            raise NotPageable(
                f"a prefill and one decode step on the paged cache differ from its own forward by {difference:.2g}, "
                f"more than rounding ({bound:.2g}): it keeps state outside attention, or mixes sequences of a step"
            )

    def _run_probes(self, probes: Sequence[list[int]]) -> list[Tensor]:
        sequences = [EngineSequence(i, p[:-1], SamplingParams(max_new_tokens=1)) for i, p in enumerate(probes)]
        for sequence in sequences:
            self.admit(sequence)  # an empty cache has room for max_num_seqs of them
        calls, steps = self._calls(), []
        for phase in ("prefill", "decode"):
            tensors = self._tensors(sequences)
            self._examples[phase] = [tensors]  # what they point at stays in the cache for the verification of passes
            steps.append(calls[phase](**tensors).clone())
            for sequence, probe in zip(sequences, probes, strict=True):
                sequence.num_computed = len(sequence)
                sequence.generated = probe[-1:]
        for sequence in sequences:
            self.release(sequence)
        return list(torch.stack(steps, dim=1))
