"""The reference engine: prompts in, text out, on any device; sequences join and leave between steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor, nn

from core.common.report import ProgramReport
from core.compilation import Progress
from core.device import Device
from core.engine.attention import NotPageable
from core.engine.config import SamplingParams
from core.engine.detokenize import Detokenizer
from core.engine.loading import LoadedModel, load_model
from core.engine.paged import PagedRunner
from core.engine.prompts import Prompt, encode_prompts
from core.engine.runner import EngineConfig, ModelRunner
from core.engine.sampling import Sampler, make_generator
from core.engine.sequence import FinishReason
from core.engine.sequence import Sequence as EngineSequence
from core.engine.static import StaticRunner
from core.errors import ModelError, UsageError
from core.host import select_device

log = logging.getLogger("core.engine")
OnText = Callable[[int, str], None]
"""Called as `on_text(prompt index, piece)` when a piece of text has become certain."""
DEFAULT_MAX_LEN = 2048
_served: WeakSet[nn.Module] = WeakSet()  # the models of open engines


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What became of one prompt. text is "" without a tokenizer; logits, if collected, is (len(token_ids), vocabulary)
    on the host, the logits each token was chosen from."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logits: Tensor | None = None


class Engine:
    """A loaded model, its compiled programs and its cache. Use as a context manager, or call `close()`.

    Not thread-safe. The model object is used as it is; `close()` gives it its own attention back.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        device: Device,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Choose the route (paged cache, else transformers' static cache, with the reason) and compile."""
        self.loaded = loaded
        self.device = device
        self.config = config or EngineConfig()
        self.max_model_len = self._max_model_len()
        self.native_attention: str = loaded.config._attn_implementation
        self._closed = False
        start = time.perf_counter()
        if loaded.model in _served:
            raise UsageError(
                f"an engine for {type(loaded.model).__name__}",
                found="the model is served by another engine",
                remedy="close that one first, or load the model once more",
            )
        self._runner = self._make_runner(progress)
        _served.add(loaded.model)
        self.compile_time_s = time.perf_counter() - start
        self._sampler = Sampler()

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | Device = "auto",
        config: EngineConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Load a model folder onto a device and compile it; see `load_model` for what a folder must hold."""
        resolved = device if isinstance(device, Device) else select_device(device)
        loaded = load_model(path, torch_device=resolved.torch_device, dtype=dtype, progress=progress)
        return cls(loaded, resolved, config, progress=progress)

    @property
    def route(self) -> str:
        """ "paged" or "static": which cache the model runs on."""
        return self._runner.route

    @property
    def route_reason(self) -> str:
        """Why the model runs on that cache."""
        return self._runner.reason

    def report(self) -> ProgramReport:
        """Return the account of the compiled programs."""
        return self._runner.report()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_text: OnText | None = None,
        collect_logits: bool = False,
    ) -> list[Completion]:
        """Generate for all prompts and return the completions in their order.

        params: one for all, or one each. Prompts beyond `max_num_seqs` wait until a sequence leaves. Raises
        `ModelError` for a prompt that is empty or longer than the context, before anything runs.
        """
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        encoded = encode_prompts(prompts, self.loaded, each, max_context=self.max_model_len)
        longest = max(map(len, encoded), default=0)
        if longest > self._runner.max_prefill_tokens:
            raise ModelError(
                f"a prompt of {longest} tokens",
                found=f"the largest prefill bucket holds {self._runner.max_prefill_tokens}",
                remedy="make the engine with a prefill bucket of that size, or shorten the prompt",
            )
        job = _Job(self, collect_logits=collect_logits, on_text=on_text)
        for index, (prompt, sampling) in enumerate(zip(encoded, each, strict=True)):
            job.add(index, list(prompt.token_ids), sampling, prompt.max_new_tokens)
        return job.run(self._runner, self._sampler)

    def close(self) -> None:
        """Free programs and cache; the second time, do nothing."""
        if not self._closed:
            self._closed = True
            self._runner.close()
            _served.discard(self.loaded.model)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _max_model_len(self) -> int:
        limit = self.loaded.max_position
        wanted = self.config.max_model_len
        if wanted is not None and limit is not None and wanted > limit:
            raise UsageError(
                f"max_model_len={wanted}", found=f"the model has {limit} positions", remedy=f"ask for at most {limit}"
            )
        length = wanted or min(limit or DEFAULT_MAX_LEN, DEFAULT_MAX_LEN)
        if length < 2:
            raise UsageError(
                f"a context of {length}",
                found="a prompt and what follows it take 2 positions",
                remedy="use a model with at least 2 positions",
            )
        return length

    def _make_runner(self, progress: Progress | None) -> ModelRunner:
        model, length = self.loaded.model, self.max_model_len
        try:
            return PagedRunner(model, self.device, self.config, max_model_len=length, progress=progress)
        except NotPageable as refusal:
            log.warning("no paged cache: %s; using transformers' static cache, one sequence at a time", refusal)
            return StaticRunner(
                model, self.device, self.config, max_model_len=length, reason=str(refusal), progress=progress
            )


class _Job:
    """One `generate` call: waiting and running sequences, their text and their logits."""

    def __init__(self, engine: Engine, *, collect_logits: bool, on_text: OnText | None) -> None:
        self._loaded = engine.loaded
        self._collect = collect_logits
        self._on_text = on_text
        self._sequences: list[EngineSequence] = []
        self._limits: list[int] = []
        self._text: dict[int, list[str]] = {}
        self._detokenizers: dict[int, Detokenizer] = {}
        self._logits: dict[int, list[Tensor]] = {}

    def add(self, index: int, prompt: list[int], params: SamplingParams, max_new_tokens: int) -> None:
        generator = None if params.greedy else make_generator(params)
        self._sequences.append(EngineSequence(index, prompt, params, generator))
        self._limits.append(max_new_tokens)
        self._text[index] = []
        self._logits[index] = []
        if params.stop:
            self._loaded.require_tokenizer()
        if self._loaded.tokenizer is not None:
            self._detokenizers[index] = Detokenizer(self._loaded.tokenizer, stop=params.stop, context=prompt[-1:])

    def run(self, runner: ModelRunner, sampler: Sampler) -> list[Completion]:
        """Prefill whatever can join, else decode one token for all running; until none is left."""
        waiting, running = list(self._sequences), list[EngineSequence]()
        try:
            with torch.no_grad():
                while waiting or running:
                    joined = _join(runner, waiting, len(running))
                    running += joined
                    batch = joined or running
                    logits = runner.run("prefill" if joined else "decode", batch)
                    self._advance(batch, logits, sampler)
                    for sequence in [s for s in running if s.finish_reason is not None]:
                        runner.release(sequence)
                        running.remove(sequence)
        finally:
            for sequence in running:
                runner.release(sequence)
        return [self._completion(sequence) for sequence in self._sequences]

    def _advance(self, batch: list[EngineSequence], logits: Tensor, sampler: Sampler) -> None:
        tokens = sampler.sample(logits, [s.params for s in batch], [s.generator for s in batch]).tolist()
        if self._collect:
            for sequence, row in zip(batch, logits.detach().to("cpu", copy=True), strict=True):
                self._logits[sequence.index].append(row)
        for sequence, token in zip(batch, tokens, strict=True):
            sequence.generated.append(token)
            self._finish_or_not(sequence, token)

    def _finish_or_not(self, sequence: EngineSequence, token: int) -> None:
        params, stops = sequence.params, self._loaded.stop_token_ids
        if token in params.stop_token_ids or (token in stops and not params.ignore_eos):
            sequence.finish_reason = "stop"
        elif len(sequence.generated) >= self._limits[sequence.index]:
            sequence.finish_reason = "length"
        detokenizer = self._detokenizers.get(sequence.index)
        if detokenizer is None:
            return
        # A stop token ends the text and is not part of it.
        piece = "" if sequence.finish_reason == "stop" else detokenizer.push(token)
        if detokenizer.stopped_by is not None:
            sequence.finish_reason = "stop"
        if sequence.finish_reason is not None:
            piece += detokenizer.flush()
        self._emit(sequence.index, piece)

    def _emit(self, index: int, piece: str) -> None:
        if piece:
            self._text[index].append(piece)
            if self._on_text is not None:
                self._on_text(index, piece)

    def _completion(self, sequence: EngineSequence) -> Completion:
        logits = self._logits[sequence.index]
        assert sequence.finish_reason is not None  # the loop ends only when every sequence has
        return Completion(
            prompt_token_ids=tuple(sequence.prompt),
            token_ids=tuple(sequence.generated),
            text="".join(self._text[sequence.index]),
            finish_reason=sequence.finish_reason,
            logits=torch.stack(logits) if logits else None,
        )


def _join(runner: ModelRunner, waiting: list[EngineSequence], num_running: int) -> list[EngineSequence]:
    """Move sequences from `waiting` while the runner has room; as many as one prefill step can take."""
    joined: list[EngineSequence] = []
    tokens = 0
    while waiting and num_running + len(joined) < runner.max_num_seqs:
        tokens += len(waiting[0])
        if tokens > runner.max_prefill_tokens or not runner.admit(waiting[0]):
            break
        joined.append(waiting.pop(0))
    return joined
