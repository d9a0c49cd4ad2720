"""The reference engine: prompts in, text out, on any device; sequences join and leave between steps.

One step: the scheduler says what is computed, the runner computes it in captured graphs, tokens included, and the
engine hands each sequence its tokens. `generate` is that in a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core.compilation.options import Progress
from core.compilation.report import ProgramReport
from core.device import Device
from core.engine.config import SamplingParams
from core.engine.inspect.cache_codes import Rounding
from core.engine.models.loading import LoadedModel, load_model
from core.engine.serve.prompts import EncodedPrompt, Prompt, check_params, encode_prompt, encode_prompts
from core.engine.serve.request import Completion, Request, RequestOutput
from core.engine.serve.route import make_runner
from core.engine.serve.scheduler import Scheduler
from core.engine.serve.served_models import SERVED, refuse_served
from core.engine.serve.stats import EngineStats, StatsCounter
from core.engine.serve.tokens import TokenReader
from core.engine.steps.runner import EngineConfig
from core.engine.steps.speculation import accept
from core.engine.steps.step import Flight, Part, Step, step_behind
from core.errors import UsageError
from core.host.selection import select_device

OnText = Callable[[int, str], None]
"""Called as `on_text(prompt index, piece)` when a piece of text has become certain."""


class Engine:
    """A loaded model, its compiled programs and its cache. Use as a context manager, or call `close()`.

    runs_ahead: whether steps are queued as `EngineConfig.run_ahead` says; may be switched off between steps.

    `generate` for a list of prompts; `add_request`, `step` and `abort` where requests come and go. Not thread-safe. The
    model object is used as it is; `close()` gives it its own attention back.
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
        self.max_model_len = self.config.context_length(loaded.max_position)
        self.native_attention: str = loaded.config._attn_implementation
        self._closed = False
        start = time.perf_counter()
        refuse_served(loaded.model)
        self._runner = make_runner(
            loaded.model, device, self.config, max_model_len=self.max_model_len, progress=progress
        )
        SERVED.add(loaded.model)
        self.compile_time_s = time.perf_counter() - start
        self._scheduler = Scheduler(
            self._runner.admit,
            max_num_seqs=self._runner.max_num_seqs,
            max_step_tokens=self._runner.max_step_tokens,
            num_drafts=self._runner.num_drafts,
        )
        self._requests: dict[int, Request] = {}
        self._collecting: set[int] = set()  # requests that want their logits
        self._num_requests = 0
        self._counts = StatsCounter()
        self._tokens = TokenReader(self._counts).read
        asked, drafts = self.config.run_ahead, self._runner.num_drafts
        self.runs_ahead = (device.capabilities.asynchronous if asked is None else asked) and not drafts
        self._flight: Flight | None = None

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
        # Weights made in inference mode could be used in no other, and not be compiled.
        with torch.inference_mode(False):
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

    @property
    def cache_rounding(self) -> Rounding | None:
        """How the model's own forward gets a cache of the same codes; None where the cache holds no codes."""
        return self._runner.cache_rounding

    def report(self) -> ProgramReport:
        """Return the account of the compiled programs."""
        return self._runner.report()

    def stats(self) -> EngineStats:
        """Return what the engine did so far, in counts."""
        return self._counts.snapshot()

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
        `ModelError` for a prompt that is empty or longer than the context, before anything runs, and `UsageError` while
        requests of `add_request` are unfinished: their outputs would be lost.
        """
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        encoded = encode_prompts(prompts, self.loaded, each, max_context=self.max_model_len)
        if self.has_unfinished:
            raise UsageError(
                f"generate for {len(prompts)} prompts",
                found=f"{len(self._requests)} requests of add_request are unfinished",
                remedy="finish them by step() or abort(), or add these prompts by add_request too",
            )
        completions: dict[int, Completion] = {}
        try:
            first = self._num_requests
            for prompt, sampling in zip(encoded, each, strict=True):
                self._add(prompt, sampling, collect_logits)
            while self._requests:
                for output in self.step():
                    if output.text and on_text is not None:
                        on_text(output.request_id - first, output.text)
                    if output.completion is not None:
                        completions[output.request_id] = output.completion
        finally:
            for request_id in tuple(self._requests):
                self.abort(request_id)
        return [completions[request_id] for request_id in sorted(completions)]

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, *, collect_logits: bool = False) -> int:
        """Queue a prompt, at any time, and return the id by which `step` and `abort` know it.

        Raises as `generate` does for a prompt that the model can't take.
        """
        params = SamplingParams() if params is None else params
        check_params(params)
        encoded = encode_prompt(prompt, self.loaded, params, max_context=self.max_model_len)
        return self._add(encoded, params, collect_logits)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """Run the model once and return what that gave, by request; nothing where nothing is to do.

        A request joins at the first step that has room for it and leaves with the step that returns its completion. A
        step that only computes a part of a prompt gives it no output. Where the model fails on the paged cache, every
        request is as it was before: step again. On the static cache, whose states may be half-done, abort.
        """
        if self._closed:
            raise UsageError("a step", found="the engine is closed", remedy="make another one")
        flight = self._take_flight()
        if flight is None:
            assert not self._requests  # an idle cache has room for any sequence
            return []
        step, output = flight
        # Kept at the end only: a step whose tokens are not handed out is computed again, and this one after it.
        following = self._run_ahead(flight)
        tokens = self._tokens(step, output)
        self._counts.count(step)
        wanted = self._wants_logits(step)
        logits = output.logits.detach().to("cpu", copy=True) if wanted else None
        outputs, row = [], 0
        for part in step.parts:
            first, row = row, row + part.num_rows
            request = self._requests.get(part.sequence.index)
            if request is None:
                self._counts.discarded += part.num_rows  # it left when this step was under way
            elif part.emits:
                rows = None if logits is None else logits[first:row]
                outputs.append(self._advance(request, part, tokens[first:row], rows))
            else:
                part.sequence.num_computed += part.num_tokens
        self._flight = following
        return outputs

    def abort(self, request_id: int) -> None:
        """End a request where it is and return its cache; one that has ended is left alone."""
        if not isinstance(request_id, int) or not 0 <= request_id < self._num_requests:
            raise UsageError(
                f"abort request {request_id!r}",
                found=f"{self._num_requests} requests were added, numbered from 0",
                remedy="pass an id that add_request returned",
            )
        request = self._requests.get(request_id)
        if request is not None:
            self._leave(request)

    def close(self) -> None:
        """End all requests and free programs and cache; the second time, do nothing."""
        if not self._closed:
            self._closed = True
            self._flight = None
            for request_id in tuple(self._requests):
                self.abort(request_id)
            self._runner.close()
            SERVED.discard(self.loaded.model)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, prompt: EncodedPrompt, params: SamplingParams, collect_logits: bool) -> int:
        if self._closed:
            raise UsageError("a request", found="the engine is closed", remedy="make another one")
        sequence = prompt.sequence(self._num_requests, params)
        request = Request(sequence, self.loaded, collect_logits=collect_logits)
        self._num_requests += 1
        self._requests[sequence.index] = request
        if collect_logits:
            self._collecting.add(sequence.index)
        self._scheduler.add(sequence)
        return sequence.index

    def _take_flight(self) -> Flight | None:
        """Return the step that is under way, or one begun now; None where there is nothing to do."""
        flight, self._flight = self._flight, None
        if flight is not None and any(part.sequence.index in self._requests for part in flight.step.parts):
            return flight
        step = self._scheduler.schedule()
        return None if step is None else Flight(step, self._runner.run(step))

    def _run_ahead(self, flight: Flight) -> Flight | None:
        """Begin the step after one whose tokens are not known yet; None where it depends on them or is not wanted."""
        step, output = flight
        following = step_behind(step) if self.runs_ahead and not self._scheduler.num_waiting else None
        if following is None or self._wants_logits(step) or (step.is_random and not output.sampled):
            return None
        if not all(part.sequence.index in self._requests for part in step.parts):
            return None
        queued = self._runner.run_ahead(following, output.tokens)
        self._counts.ahead += queued is not None
        return None if queued is None else Flight(following, queued)

    def _wants_logits(self, step: Step) -> bool:
        return bool(self._collecting) and any(part.sequence.index in self._collecting for part in step.parts)

    def _advance(self, request: Request, part: Part, tokens: Sequence[int], logits: Tensor | None) -> RequestOutput:
        """Hand a sequence the tokens that its part of a step gave, up to one that ends it."""
        sequence = request.sequence
        text, num_generated = "", len(sequence.generated)
        for row, token in enumerate(accept(part.drafts, tokens) if part.drafts else tokens):
            text += request.push(token, logits[row] if request.collect_logits and logits is not None else None)
            if sequence.finish_reason is not None:
                break
        new = tuple(sequence.generated[num_generated:])
        # The last of them is computed by a later step, the accepted drafts before it are in the cache.
        sequence.num_computed += part.num_tokens + len(new) - 1
        self._counts.accepted += len(new) - 1
        completion = request.completion()
        if completion is not None:
            self._leave(request)
        return RequestOutput(request_id=sequence.index, token_ids=new, text=text, completion=completion)

    def _leave(self, request: Request) -> None:
        self._scheduler.remove(request.sequence)
        self._runner.release(request.sequence)
        self._requests.pop(request.sequence.index, None)
        self._collecting.discard(request.sequence.index)
        self._counts.left += request.sequence.num_computed > 0  # who waited never joined
