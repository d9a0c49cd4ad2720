"""Running a transformers model on the paged cache: bucketed programs for each phase, one shared cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from core.compilation.compile import compile
from core.compilation.options import Progress
from core.compilation.report import ProgramReport
from core.compilation.shared_trace import SharedTrace
from core.device import Device
from core.engine.config import SamplingParams
from core.engine.inspect.attention import AttentionLayer, NotPageable, inspect
from core.engine.inspect.cache_codes import CACHE_DTYPES, Scales, layer_scales, rounding
from core.engine.inspect.masks import EXHAUSTIVE
from core.engine.inspect.probe import depends_on_longest
from core.engine.paged.cache import BlockPool, PagedCache
from core.engine.paged.call import PagedCall, PagedLogits
from core.engine.paged.self_check import check_same_function
from core.engine.static.cache import CachedPhase
from core.engine.steps.runner import EngineConfig, powers
from core.engine.steps.sampling import GREEDY_ROW, Sampling, sampling_guard
from core.engine.steps.sequence import Sequence as EngineSequence
from core.engine.steps.staged import StagedSteps
from core.engine.steps.step import Part, Step, StepOutput, step_inputs, step_tensors
from core.errors import ModelError
from core.quantization.layers import continuous


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
        self._sampling = config.sampling
        self.max_num_seqs = config.max_num_seqs
        self.num_drafts = config.speculative
        self._closed = False
        layers = self._inspect(max_model_len)
        self._codes = CACHE_DTYPES.get(config.kv_cache_dtype)
        scales = self._scales(layers)
        self.cache_rounding = None if self._codes is None else rounding(model, layers, scales, self._codes)
        layers = layers if self._codes is None else {m: replace(each, dtype=self._codes) for m, each in layers.items()}
        num_blocks = 1 + config.max_num_seqs * self._max_blocks
        self._check_memory(layers.values(), num_blocks)
        self._before = model.config._attn_implementation
        self._cache = self._make_cache(layers, num_blocks, scales)
        self._pool = BlockPool(num_blocks)
        self._examples: dict[str, list[dict[str, Tensor]]] = {}
        self._program: Any = None
        self._staged: StagedSteps | None = None
        try:
            self._calls = self._make_calls()
            with continuous(self._model):  # what is compared is the cache, not which side of a step a code falls to
                self._check_same_function(max_model_len)
            buckets = self._buckets(config, max_model_len)
            self.max_step_tokens = max(b["tokens"] for b in buckets["prefill"])
            max_rows = max(b["rows"] for sizes in buckets.values() for b in sizes)
            self._greedy_rows = self._greedy_params(max_rows)
            shared = SharedTrace(op="core::attention", argument="max_query_len", values=self._query_lens())
            own = {"outputs": [("rows",), ("rows", None)], "examples": self._examples, "shared": shared}
            options = config.compile_options(self._calls, device.capabilities, **own, progress=progress)
            inputs = step_inputs(self._max_blocks)
            self._program = compile(self._calls, device, inputs=inputs, buckets=buckets, options=options)
            if self._program.keys:
                most = max(b["seqs"] for sizes in buckets.values() for b in sizes)
                self._staged = StagedSteps(
                    self._program, device, block_size=config.block_size, max_rows=max_rows, max_seqs=most
                )
        except BaseException:
            self.close()
            raise

    def admit(self, sequence: EngineSequence) -> bool:
        """Reserve blocks for the prompt and everything that may be generated from it."""
        if sequence.blocks:
            return True
        needed = -(-(len(sequence.prompt) + sequence.params.max_new_tokens) // self._block_size)
        needed = min(needed, self._max_blocks)
        if needed > self._pool.num_free:
            return False
        sequence.blocks = self._pool.take(needed)
        return True

    def run(self, step: Step) -> StepOutput:
        """Compute a step in the graph of its phase, which a graph of another phase never stands in for.

        A captured step is queued and not waited for.
        """
        guards = {"sampling": sampling_guard(step.is_random, self._sampling)} if step.phase == "decode" else {}
        sampled = guards.get("sampling") == "random"
        key = self._staged.key(step, guards) if self._staged is not None else None
        try:
            with self._program.serving():
                if key is not None and self._staged is not None:
                    return self._staged.run(key, step, sampled=sampled)
                return self._run_unstaged(step, guards, sampled=sampled)
        finally:
            self._cache.step.clear()  # an interrupted step must not serve a later call of the model

    def run_ahead(self, step: Step, tokens: Tensor) -> StepOutput | None:
        """Queue a decode step behind the one under way; None where it is not captured."""
        guard = sampling_guard(step.is_random, self._sampling)
        key = self._staged.key(step, {"sampling": guard}) if self._staged is not None else None
        if key is None or self._staged is None:
            return None
        if self._device.capabilities.update and "input_ids" in self._program.host_arguments(key):
            return None  # its values would have to be known on the host
        with self._program.serving():
            return self._staged.run(key, step, sampled=guard == "random", feed=tokens)

    def _run_unstaged(self, step: Step, guards: dict[str, Sampling], *, sampled: bool) -> StepOutput:
        """Compute a step that no graph serves, or a program without any; counted there."""
        if self._staged is not None:
            self._staged.forget()
        params = step.sampling_params(self._device.torch_device) if sampled else self._greedy_rows[: step.num_rows]
        tokens, logits = self._program(step.phase, guards=guards, sampling_params=params, **self._tensors(step))
        return StepOutput(tokens, logits, sampled)

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
        self._staged = None
        if self._program is not None:
            self._program.close()
        self._cache.close()
        self._model.set_attn_implementation(self._before)

    def phases(self) -> tuple[CachedPhase, ...]:
        """Return the logits of prefill and decode as they are compiled, with the inputs of the self-check.

        Without the choice of tokens, in which the smallest error of a logit is all or nothing. Valid until `close`.
        """
        declared = step_inputs(self._max_blocks)
        del declared["sampling_params"]
        dynamic = {name: [d for d, size in enumerate(s.shape) if isinstance(size, str)] for name, s in declared.items()}
        return tuple(
            CachedPhase(
                name=name,
                function=self._calls[name].logits,
                inputs={input_name: self._examples[name][0][input_name] for input_name in declared},
                dynamic=dynamic,
            )
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

    def _tensors(self, step: Step) -> dict[str, Tensor]:
        return step_tensors(
            step, max_blocks=self._max_blocks, block_size=self._block_size, device=self._device.torch_device
        )

    def _greedy_params(self, num_rows: int) -> Tensor:
        return torch.tensor([GREEDY_ROW], device=self._device.torch_device).repeat(num_rows, 1)

    def _query_lens(self) -> dict[str, int]:
        """Return for each phase the most tokens of a sequence in a step, 0 for any: the op may skip its general form.

        Nothing else differs between the phases' calls.
        """
        return {"decode": 1, "prefill": 0} | ({"verify": 1 + self.num_drafts} if self.num_drafts else {})

    def _make_calls(self) -> dict[str, PagedCall]:
        lens = self._query_lens()
        return {phase: PagedCall(PagedLogits(self._model, self._cache.step, most)) for phase, most in lens.items()}

    def _buckets(self, config: EngineConfig, max_model_len: int) -> dict[str, list[dict[str, int]]]:
        sizes, seqs, width = config.decode_sizes(self._device.capabilities), config.max_num_seqs, 1 + self.num_drafts
        prefill = config.prefill_buckets or powers(32, max(max_model_len, seqs), 4)
        buckets = {
            "decode": [{"tokens": size, "seqs": size, "rows": size} for size in sizes],
            "prefill": [{"tokens": size, "seqs": seqs, "rows": seqs} for size in prefill],
            "verify": [{"tokens": size * width, "seqs": size, "rows": size * width} for size in sizes],
        }
        return {phase: buckets[phase] for phase in self._calls}

    def _check_memory(self, layers: Any, num_blocks: int) -> None:
        wanted = sum(num_blocks * self._block_size * layer.bytes_per_position for layer in layers)
        memory = self._device.parts.memory()
        free = memory.total_bytes - memory.used_bytes
        if wanted > free:
            raise self._no_room(wanted, f"{self._device.name} has {free / 2**30:.2f} GiB free")

    def _scales(self, layers: Mapping[nn.Module, AttentionLayer]) -> dict[nn.Module, Scales]:
        """Return the scales of a quantised cache, which the attention modules bring; nothing for another one."""
        if self._codes is None:
            return {}
        found = {module: layer_scales(module, layer, self._device.torch_device) for module, layer in layers.items()}
        given = sum(any(scale is not None for scale in each) for each in found.values())
        self.reason += f"; keys and values as {self._codes}, with scales of {given} of {len(found)} layers, else 1"
        return found

    def _make_cache(
        self, layers: dict[nn.Module, AttentionLayer], num_blocks: int, scales: dict[nn.Module, Scales]
    ) -> PagedCache:
        device, size = self._device.torch_device, self._block_size
        try:
            return PagedCache(layers, num_blocks=num_blocks, block_size=size, device=device, scales=scales)
        except torch.OutOfMemoryError as error:  # what other processes hold, `memory` does not count as used
            wanted = sum(num_blocks * size * layer.bytes_per_position for layer in layers.values())
            raise self._no_room(wanted, " ".join(str(error).split())[:200]) from None

    def _no_room(self, num_bytes: int, found: str) -> ModelError:
        most = f"{self.max_num_seqs} sequences of up to {self._max_blocks * self._block_size} tokens"
        return ModelError(
            f"a key/value cache of {num_bytes / 2**30:.2f} GiB ({most})",
            found=found,
            remedy="lower max_num_seqs or max_model_len",
        )

    @torch.no_grad()
    def _check_same_function(self, max_model_len: int) -> None:
        """Compare a prefill and one decode step with the model's own forward; raise `NotPageable` if they differ."""
        check_same_function(
            self._model,
            lambda probes: self._run_probes(probes, max_model_len),
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            rounding=self.cache_rounding,
        )

    def _run_probes(self, probes: Sequence[list[int]], max_model_len: int) -> dict[str, list[Tensor]]:
        """Return the logits (2, vocabulary) of each one's last two tokens, the last by decode and by verify."""
        params = SamplingParams(max_new_tokens=1 + self.num_drafts)
        sequences = [EngineSequence(index, probe[:-1], params) for index, probe in enumerate(probes)]
        for sequence in sequences:
            self.admit(sequence)  # an empty cache has room for max_num_seqs of them
        first = self._run_probe(Step("prefill", tuple(Part(s, len(s)) for s in sequences)))
        for sequence, probe in zip(sequences, probes, strict=True):
            sequence.num_computed = len(sequence)
            sequence.generated = probe[-1:]
        parts = [Part(sequence, 1) for sequence in sequences]
        found = {"decode": self._run_probe(Step("decode", tuple(parts)))}
        if self.num_drafts:
            # The same token once more, and behind it what fits of any others.
            drafts = [tuple(probe[: min(self.num_drafts, max_model_len - len(probe))]) for probe in probes]
            parts = [Part(sequence, 1, guesses) for sequence, guesses in zip(sequences, drafts, strict=True)]
            found["verify"] = self._run_probe(Step("verify", tuple(parts)))
        for sequence in sequences:
            self.release(sequence)
        return {phase: list(torch.stack([first, second], dim=1)) for phase, second in found.items()}

    def _run_probe(self, step: Step) -> Tensor:
        """Return the logits (seqs, vocabulary) after each sequence's pending tokens; keep the inputs as examples."""
        tensors = self._tensors(step)
        # What they point at stays in the cache, for the verification of passes.
        example = {**tensors, "sampling_params": self._greedy_params(step.num_rows)}
        self._examples[step.phase] = [example, {**example, "input_ids": tensors["input_ids"].flip(0)}]
        logits = self._calls[step.phase].logits(**tensors)
        ends = list(accumulate(part.num_rows for part in step.parts))
        return logits[[end - part.num_rows for end, part in zip(ends, step.parts, strict=True)]]
