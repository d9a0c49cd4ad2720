"""The reference engine: prompts in, text out, on any device; sequences join and leave between steps.

One step: the scheduler says what is computed, the runner computes it in captured graphs, tokens included, and the
engine hands each sequence its tokens. `generate` is that in a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.common.given import made_of
from core.compilation.options import Progress
from core.device import Device
from core.engine.config import SamplingParams
from core.engine.held import as_loaded
from core.engine.inspect.batches import check_batches
from core.engine.lora.adapters import Adapters
from core.engine.models.loading import LoadedModel, load_model
from core.engine.patience import Patience
from core.engine.serve.drafting import load_draft
from core.engine.serve.handing import HandsOut
from core.engine.serve.prompts import (
    EncodedPrompt,
    Prompt,
    as_params,
    as_prompts,
    encode_prompts,
    one_each,
)
from core.engine.serve.request import Completion, Request, RequestOutput, check_request_id
from core.engine.serve.resting import Resting
from core.engine.serve.route import SERVED, make_runner
from core.engine.serve.scheduler import Scheduler
from core.engine.serve.stats import Described, EngineStats
from core.engine.serve.stepping import Pace, StepLoop, StepTurn, Timeline
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sleeper import make_sleeper
from core.engine.steps.step import Step
from core.errors import UsageError
from core.host.selection import select_device

OnText = Callable[[int, str], None]
"""Called as `on_text(prompt index, piece)` when a piece of text has become certain."""


class Engine(HandsOut, Resting, Described):
    """A loaded model, its compiled programs and its cache. Use as a context manager, or call `close()`.

    `generate` for a list of prompts; `add_request`, `step` and `abort` where requests come and go; `sleep`, `wake` and
    `load_weights` between requests. For one thread at a time: a call from another thread, or from a signal handler,
    during a step is a `UsageError`. The model object is used as it is; `close()` gives it its own attention back.
    runs_ahead: whether steps are queued as `EngineConfig.run_ahead` says; may be switched off.
    """

    def __init__(
        self,
        model: LoadedModel | nn.Module,
        device: str | Device | torch.device = "auto",
        config: EngineConfig | Mapping[str, Any] | None = None,
        *,
        tokenizer: Any | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Choose the route (paged cache, else transformers' static cache, else none, with the reasons) and compile.

        model: what `load_model` returned, or transformers' own model on the device, then with its tokenizer
        (`as_loaded`). config: or a mapping of its fields.
        """
        self.device = device = select_device(device)
        self.config = config = made_of(EngineConfig, config or {}, "config")
        self.loaded = loaded = as_loaded(model, tokenizer, device.torch_device)
        self.max_model_len = self.config.context_length(loaded.max_position)
        self.native_attention: str = loaded.config._attn_implementation
        self._closed = False
        self._sleeper = make_sleeper(loaded.model, device, self.config)
        how: Any = {
            "max_model_len": self.max_model_len,
            "progress": progress or Patience(device, config.options.lowering),
        }
        #: The draft model; None without one.
        self.draft = load_draft(loaded, device, self.config, **how)
        start = time.perf_counter()
        self._runner, self.drafter = make_runner(loaded, self.draft, device, self.config, sleeper=self._sleeper, **how)
        self.compile_time_s = time.perf_counter() - start
        self._adapters = Adapters(self._runner.adapters)
        scheduler = self._scheduler = Scheduler(
            self._runner.cache,
            max_num_seqs=self._runner.max_num_seqs,
            max_step_tokens=self._runner.max_step_tokens,
            mixed_step_tokens=self.config.mixed_step_tokens,
            num_drafts=self._runner.num_drafts,
            propose=self.drafter.propose,
            whole_prompts=self._runner.whole_prompts,
        )
        self._requests: dict[int, Request] = {}
        self._collecting: set[int] = set()  # requests that want their logits
        self._completions: dict[int, Completion] | None = None  # of the `generate` under way, by request
        self._num_requests = 0
        self._counts = EngineStats()
        self._turn = StepTurn()
        self._steps = StepLoop(self._runner, scheduler, self.drafter, self._counts, Pace(self.config.decode_steps))
        ahead = self.config.run_ahead
        self.runs_ahead = (device.capabilities.asynchronous if ahead is None else ahead) and not self._runner.num_drafts
        if self.config.deterministic is not None:
            try:
                check_batches(self.generate, loaded, self.max_model_len, self._runner.max_num_seqs)
            except BaseException:
                self.close()
                raise

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | Device | torch.device = "auto",
        config: EngineConfig | Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Load a model folder onto a device and compile it; see `load_model` for what a folder must hold."""
        config = made_of(EngineConfig, config or {}, "config")  # before anything is read
        resolved = select_device(device)
        config.check_device(resolved)
        resolved.parts.prepare()
        with torch.inference_mode(False):  # weights made in that mode can't be compiled
            load = partial(load_model, path, dtype=dtype, progress=progress)
            loaded = load(torch_device=resolved.torch_device, copy_in=resolved.parts.copy_in)
        return cls(loaded, resolved, config, progress=progress)

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Record what the steps within a block spend their time on; the list grows until the block ends."""
        found: Timeline = []
        self._steps.timeline = found
        try:
            yield found
        finally:
            self._steps.timeline = None

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | Tensor,
        params: SamplingParams | Mapping[str, Any] | Sequence[SamplingParams] | None = None,
        *,
        on_text: OnText | None = None,
        collect_logits: bool = False,
        lora: str | Sequence[str | None] | None = None,
        **settings: Any,
    ) -> list[Completion]:
        """Generate for all prompts (one alone is a list of one) and return one completion for each, in their order.

        params: one for all, or one each; or fields of a `SamplingParams` by name, `generate("Once", stop="\\n")`.
        lora: the name of a loaded adapter, for all or each. on_text may call `step`, `abort`
        and `close`: what they end has the finish reason "abort". Prompts beyond `max_num_seqs` wait until a sequence
        leaves. Raises `ModelError` for an empty prompt or one longer than the context, before anything runs, and
        `UsageError` while requests of `add_request` are unfinished: their outputs would be lost.
        """
        prompts = as_prompts(prompts)
        each = as_params(params, len(prompts), settings)
        names = one_each("adapters", lora, len(prompts))
        encoded = encode_prompts(prompts, self.loaded, each, max_context=self.max_model_len)
        if self.has_unfinished:
            raise UsageError(
                f"generate for {len(prompts)} prompts",
                found=f"{self._num_unfinished} requests of add_request are unfinished",
                remedy="finish them by step() or abort(), or add these prompts by add_request too",
            )
        completions: dict[int, Completion] = {}
        around, self._completions = self._completions, completions
        try:
            first = self._num_requests
            for prompt, sampling, name in zip(encoded, each, names, strict=True):
                self._add(prompt, sampling, collect_logits, name)
            while self._requests:
                for output in self.step():
                    if output.text and on_text is not None:
                        on_text(output.request_id - first, output.text)
        finally:
            for request_id in (*self._requests, *self._steps.untold):
                self.abort(request_id)
            self._completions = around
        return [completions[first + index] for index in range(len(encoded))]

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        collect_logits: bool = False,
        lora: str | None = None,
        **settings: Any,
    ) -> int:
        """Queue a prompt, at any time, and return the id by which `step` and `abort` know it.

        params, or settings by name: as of `generate`. lora: an adapter's name.

        Raises as `generate` does for a prompt that the model can't take or an adapter that is not loaded, and
        `UsageError` from a callback of `generate`, which would take the outputs.
        """
        if self._completions is not None:
            found = "generate is running, and would take its outputs"
            raise UsageError("add a request", found=found, remedy="wait until it returns")
        each = as_params(params, 1, settings)
        (encoded,) = encode_prompts([prompt], self.loaded, each, max_context=self.max_model_len)
        return self._add(encoded, each[0], collect_logits, lora)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or ended in a step that was interrupted before it told of that."""
        return self._num_unfinished > 0

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """Run the model and return the outputs by request; empty if there is nothing to do.

        Once, or several times where sequences only generate (`EngineConfig.decode_steps`). A request joins at the first
        step that has room for it and leaves with the step that returns its completion. A step that only computes a part
        of a prompt gives it no output. Where the model fails, every request is as it was before: step again. On the
        static cache, whose states may be half-done, abort. Interrupted where tokens were computed
        already, the next call hands them out.
        """
        self._check_ready("a step")
        with self._turn.taken("a step"):
            done = self._steps.next(self._requests.__contains__, self._wants_logits, ahead=self.runs_ahead)
            outputs = [] if done is None else self._hand_out(done)
            self._steps.handed_out()
            return outputs

    def abort(self, request_id: int) -> Completion | None:
        """End a request now, free its cache, and return its completion so far; None if it has already ended."""
        check_request_id(request_id, self._num_requests)
        with self._turn.taken("an abort"):
            untold, request = self._steps.withdraw(request_id), self._requests.get(request_id)
            return untold if request is None else self._leave(request, request.abort())

    def close(self) -> None:
        """End all requests and free programs and cache; the second time, do nothing."""
        with self._turn.taken("closing the engine"):
            if not self._closed:
                self._closed = True
                self._steps.close()
                for request in tuple(self._requests.values()):
                    self._leave(request, request.abort())
                self._free()
                SERVED.difference_update(each.model for each in (self.loaded, self.draft) if each is not None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, prompt: EncodedPrompt, params: SamplingParams, collect_logits: bool, lora: str | None = None) -> int:
        self._check_ready("a request")
        with self._turn.taken("a request"):
            sequence = prompt.sequence(self._num_requests, params)
            sequence.adapter, sequence.cache_salt = self._adapters.find(lora)
            request = Request(sequence, self.loaded, collect_logits=collect_logits)
            self._num_requests += 1
            self._requests[sequence.index] = request
            if collect_logits:
                self._collecting.add(sequence.index)
            self._scheduler.add(sequence)
            return sequence.index

    def _wants_logits(self, step: Step) -> bool:
        return bool(self._collecting) and any(part.sequence.index in self._collecting for part in step.parts)
