"""The sequences of one request in the engine: admitted, followed, counted, ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core.engine.config import SamplingParams
from core.engine.http.config import ServerConfig
from core.engine.http.errors import ApiError, of_core
from core.engine.http.load import max_running
from core.engine.http.metrics import Metrics
from core.engine.http.texts import Texts
from core.engine.serve.async_engine import AsyncEngine
from core.engine.serve.grammar import GrammarsNotInstalledError
from core.engine.serve.prompts import EncodedPrompt, Prompt
from core.engine.serve.request import Completion, RequestOutput
from core.engine.serve.tickets import Receive, Ticket
from core.errors import CoreError, EngineError, ModelError

log = logging.getLogger("core.serve")
_NUM_SEEDS = 2**64


class Choice:
    """One sequence of a request."""

    def __init__(self, index: int, prompt: EncodedPrompt, number: int) -> None:
        self.index = index
        self.prompt = prompt
        #: Its number among the choices of its prompt, from 0.
        self.number = number
        #: Outputs of the engine that were not taken yet.
        self.outputs: deque[RequestOutput] = deque()
        self.num_tokens = 0
        #: Characters of the tokens whose probabilities were told.
        self.num_chars = 0
        self.completion: Completion | None = None
        self.error: Exception | None = None
        self.ticket: Ticket | None = None
        self.last_s: float | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.completion is not None or self.error is not None


class Admission:
    """How many sequences the engine has been given, and whether it takes more; it belongs to the event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self.capacity = max_running(engine.engine) + config.max_queue
        #: Sequences that were let in and have not ended.
        self.active = 0
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def check(self, count: int) -> None:
        """Admit this many sequences, or raise an `ApiError`."""
        if self._engine.failure is not None:
            raise of_core(self._engine.failure, status=503, code="engine_dead")
        if self.draining:
            raise ApiError(503, "the server is about to stop", code="stopping", retry_after_s=5)
        if count > self.capacity:
            message = f"{count} sequences at once; this server takes {self.capacity} at most"
            raise ApiError(400, message, param="n", code="too_many_sequences")
        if self.active + count > self.capacity:
            message = f"{self.active} sequences run or wait already, of {self.capacity}; try again later"
            raise ApiError(429, message, code="queue_full", retry_after_s=1)
        self.active += count
        self.idle.clear()

    def leave(self, count: int = 1) -> None:
        """Note that so many sequences have ended."""
        self.active -= count
        if not self.active:
            self.idle.set()


class Generation:
    """The sequences of one request. `close` it in any case: what still runs is ended."""

    def __init__(
        self, engine: AsyncEngine, admission: Admission, metrics: Metrics, request_id: str, lora: str | None = None
    ) -> None:
        """lora: the name of the adapter that they have."""
        self._lora = lora
        self._engine, self._admission, self._metrics = engine, admission, metrics
        self._ready = asyncio.Event()
        self.request_id = request_id
        self.choices: list[Choice] = []
        self.prompts: list[EncodedPrompt] = []
        self.began_s = time.perf_counter()
        self.first_token_s: float | None = None

    async def begin(
        self, texts: Texts, prompts: Sequence[Prompt], params: SamplingParams, n: int, asked: Asked
    ) -> None:
        """Encode the prompts and queue n sequences of each; `ApiError`, with none queued, if one can't be served."""
        count = len(prompts) * n
        self._admission.check(count)
        try:
            self.prompts = await self._encoded(texts, prompts, params, asked)
        except BaseException:
            self._admission.leave(count)
            raise
        for prompt in self.prompts:
            for number in range(n):
                self._submit(prompt, number, _numbered(params, number, prompt.max_new_tokens))

    async def take(self) -> list[tuple[Choice, list[RequestOutput]]]:
        """Wait for outputs and return them by choice, nothing once all have ended; `ApiError` where one failed."""
        while not any(choice.outputs or choice.error for choice in self.choices):
            if all(choice.ended for choice in self.choices):
                return []
            await self._ready.wait()
            self._ready.clear()
        taken = []
        for choice in self.choices:
            if choice.error is not None:
                raise self._refusal(choice.error)
            outputs = list(choice.outputs)
            choice.outputs.clear()
            ended = outputs[-1].completion if outputs else None
            if ended is not None and ended.failure is not None:
                raise ApiError(400, ended.failure, code="invalid_grammar")
            if ended is not None and ended.finish_reason == "abort":
                raise ApiError(503, "the server stopped before the answer was complete", code="stopping")
            if outputs:
                taken.append((choice, outputs))
        return taken

    def close(self, **about: Any) -> None:
        """End what still runs, and log what became of the request."""
        for choice in self.choices:
            if choice.ticket is not None:
                choice.ticket.abort()
        if not self.choices:
            return  # it was refused
        now = time.perf_counter()
        first = None if self.first_token_s is None else round(1000 * (self.first_token_s - self.began_s), 2)
        outcomes = [
            c.completion.finish_reason if c.completion else "error" if c.error else "abort" for c in self.choices
        ]
        fields = {
            "request_id": self.request_id,
            **({} if self._lora is None else {"lora": self._lora}),
            **self.usage(),
            "outcomes": outcomes,
            "first_token_ms": first,
            "duration_ms": round(1000 * (now - self.began_s), 2),
            **about,
        }
        log.info("generation", extra={"fields": fields})

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's count of tokens: each prompt once, whatever `n`, and as it was found by its first choice."""
        prompt = sum(len(each) for each in self.prompts)
        generated = sum(choice.num_tokens for choice in self.choices)
        firsts = [choice.completion for choice in self.choices if choice.number == 0 and choice.completion]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in firsts)},
        }

    async def _encoded(
        self, texts: Texts, prompts: Sequence[Prompt], params: SamplingParams, asked: Asked
    ) -> list[EncodedPrompt]:
        try:
            await texts.check_grammar(params)
        except GrammarsNotInstalledError as error:
            log.warning("a request is refused: %s", error)  # its remedy is the server's matter, not the client's
            message = f"this server has no library for {error.asked}; leave {asked.grammar_field!r} out"
            raise ApiError(400, message, param=asked.grammar_field, code="unsupported_parameter") from None
        except CoreError as error:
            raise of_core(error, param=asked.grammar_field, code="invalid_grammar") from None
        try:
            encoded = await texts.encode(prompts, params)
        except CoreError as error:
            code = "invalid_prompt" if isinstance(error, ModelError) else None
            raise of_core(error, param=asked.prompt_field, code=code) from None
        asked.check(encoded)
        return encoded

    def _submit(self, prompt: EncodedPrompt, number: int, params: SamplingParams) -> None:
        choice = Choice(len(self.choices), prompt, number)
        self.choices.append(choice)
        self._metrics.prompt_tokens.inc(len(prompt))
        receive: Receive = lambda output: self._receive(choice, output)  # noqa: E731  (a callback)
        try:
            choice.ticket = self._engine.submit(prompt.token_ids, params, receive, self._lora)
        except CoreError as error:
            self._receive(choice, error)

    def _receive(self, choice: Choice, output: RequestOutput | Exception) -> None:
        now = time.perf_counter()
        if isinstance(output, Exception):
            choice.error = output
            self._count_end("error", now)
        else:
            self._count_tokens(choice, len(output.token_ids), now)
            choice.outputs.append(output)
            if output.completion is not None:
                choice.completion = output.completion
                self._count_end(output.completion.finish_reason, now)
        self._ready.set()

    def _count_tokens(self, choice: Choice, count: int, now: float) -> None:
        if not count:
            return
        choice.num_tokens += count
        metrics, before = self._metrics, choice.last_s
        choice.last_s = now
        metrics.generated_tokens.inc(count)
        if before is None:
            metrics.first_token.observe(now - self.began_s)
            self.first_token_s = self.first_token_s or now
            return
        for _ in range(count):
            metrics.between_tokens.observe((now - before) / count)

    def _count_end(self, outcome: str, now: float) -> None:
        self._metrics.sequences.labels(outcome).inc()
        self._metrics.whole.observe(now - self.began_s)
        self._admission.leave()

    def _refusal(self, error: Exception) -> ApiError:
        if isinstance(error, EngineError):
            dead = error is self._engine.failure
            return of_core(error, status=503 if dead else 500, code="engine_dead" if dead else "step_failed")
        if isinstance(error, CoreError):
            return of_core(error)
        log.error("a request failed", exc_info=error)
        return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")


class Asked:
    """What a request asked for, for refusals that need its tokens."""

    def __init__(
        self, prompt_field: str, grammar_field: str, max_tokens_field: str, max_tokens: int | None, max_model_len: int
    ) -> None:
        self.prompt_field = prompt_field
        self.grammar_field = grammar_field
        self._max_tokens_field = max_tokens_field
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len

    def check(self, prompts: Sequence[EncodedPrompt]) -> None:
        """Raise `ApiError` where the context can't hold what was asked for: an answer would be cut in silence."""
        for prompt in prompts:
            if prompt.bounded and self._max_tokens is not None:
                message = (
                    f"{self._max_tokens_field}={self._max_tokens}: the prompt has {len(prompt)} tokens and the context "
                    f"holds {self._max_model_len}, which leaves {prompt.max_new_tokens}"
                )
                raise ApiError(400, message, param=self._max_tokens_field, code="context_length_exceeded")


def _numbered(params: SamplingParams, number: int, max_new_tokens: int) -> SamplingParams:
    """Return the parameters of choice `number` of a prompt: one seed gives each choice another."""
    seed = params.seed if params.seed is None or not number else (params.seed + number) % _NUM_SEEDS
    return replace(params, seed=seed, max_new_tokens=max_new_tokens)
