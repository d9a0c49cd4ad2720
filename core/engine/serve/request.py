"""One request from its first token to its completion: its text, its stops, its logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.engine.config import SamplingParams
from core.engine.models.loading import LoadedModel
from core.engine.serve.detokenize import Detokenizer
from core.engine.serve.grammar import constraint
from core.engine.steps.sequence import FinishReason, TokenLogprobs
from core.engine.steps.sequence import Sequence as EngineSequence
from core.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The result of one prompt."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    #: "" without a tokenizer.
    text: str
    #: "stop": a stop token or string. "length": `max_new_tokens` were generated. "abort": it was ended before.
    finish_reason: FinishReason
    #: The most tokens it could have: the number asked for, or fewer if the context ends earlier.
    max_new_tokens: int
    #: Tokens of the prompt whose keys and values the cache held already, of a sequence that began alike.
    num_cached_tokens: int = 0
    #: If collected: (len(token_ids), vocabulary) on the host, the logits each token was chosen from.
    logits: Tensor | None = None
    #: One for each token, where `SamplingParams.logprobs` asks for it.
    logprobs: tuple[TokenLogprobs, ...] | None = None
    #: Why it was aborted, where its own `json_schema` or `regex` is to blame.
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The output of one step for one request."""

    request_id: int
    #: The new tokens.
    token_ids: tuple[int, ...]
    #: The text that is now final.
    text: str
    #: The outcome, once the request has ended.
    completion: Completion | None = None
    #: One for each new token, where `SamplingParams.logprobs` asks for it.
    logprobs: tuple[TokenLogprobs, ...] | None = None


def check_request_id(request_id: object, num_requests: int) -> None:
    """Raise `UsageError` unless this is an id that was given out."""
    if not isinstance(request_id, int) or not 0 <= request_id < num_requests:
        raise UsageError(
            f"abort request {request_id!r}",
            found=f"{num_requests} requests were added, numbered from 0",
            remedy="pass an id that add_request returned",
        )


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    outside = [token for token, _ in params.logit_bias if token >= vocab_size]
    if outside:
        raise UsageError(
            f"logit_bias for token {outside[0]}",
            found=f"the model knows 0 to {vocab_size - 1}",
            remedy="name token ids of this model's tokenizer",
        )


class Request:
    """A sequence with its text and, if they are collected, its logits."""

    def __init__(self, sequence: EngineSequence, loaded: LoadedModel, *, collect_logits: bool = False) -> None:
        """Begin; raise `ModelError` where the text may end at a string and there is no tokenizer."""
        params = sequence.params
        if params.stop:
            loaded.require_tokenizer()
        self.sequence = sequence
        self.collect_logits = collect_logits
        own = () if params.ignore_eos else loaded.stop_token_ids
        sequence.stop_token_ids = frozenset((*params.stop_token_ids, *own))
        _check_ids(params, loaded.vocab_size)
        sequence.constraint = constraint(loaded, params)
        sequence.update_shaping()
        self._loaded = loaded
        self._detokenizer = self._new_detokenizer()
        self._text: list[str] = []
        self._logits: list[Tensor] = []
        self._logprobs: list[TokenLogprobs] = []

    def _new_detokenizer(self) -> Detokenizer | None:
        params, tokenizer = self.sequence.params, self._loaded.tokenizer
        if tokenizer is None:
            return None
        return Detokenizer(tokenizer, stop=tuple(params.stop), context=self.sequence.prompt[-1:])

    def rewind(self, tokens: Sequence[int]) -> None:
        """Be as it was after these tokens, the first of those that were pushed; may be called again if interrupted."""
        sequence = self.sequence
        sequence.generated.clear()
        sequence.finish_reason = None
        sequence.constraint = constraint(self._loaded, sequence.params)
        sequence.update_shaping()
        self._detokenizer = self._new_detokenizer()
        self._text.clear()
        del self._logits[len(tokens) :], self._logprobs[len(tokens) :]
        for token in tokens:
            self.push(token, None)

    def push_all(self, tokens: Iterable[int], logits: Tensor | None) -> str:
        """Push tokens, with the row of logits of each, up to one that ends the sequence; return the text that is now
        final."""
        text = ""
        for row, token in enumerate(tokens):
            if self.sequence.params.logprobs is not None:
                self._logprobs.append(self.sequence.reported[row])
            text += self.push(token, logits[row] if self.collect_logits and logits is not None else None)
            if self.sequence.finish_reason is not None:
                break
        return text

    def push(self, token: int, logits: Tensor | None) -> str:
        """Take the next token and the logits it is from, note whether it is the last, and return the certain text."""
        sequence = self.sequence
        sequence.generated.append(token)
        if logits is not None:
            self._logits.append(logits)
        if len(sequence.generated) == sequence.params.min_tokens:
            sequence.update_shaping()
        complete = sequence.constraint is not None and sequence.constraint.push(token)
        if self._failure is not None:
            sequence.finish_reason = "abort"
        elif complete or token in sequence.stop_token_ids:
            sequence.finish_reason = "stop"
        elif len(sequence.generated) >= sequence.params.max_new_tokens:
            sequence.finish_reason = "length"
        piece = self._decode(token)
        if piece:
            self._text.append(piece)
        return piece

    def output(self, first: int, text: str, completion: Completion | None) -> RequestOutput:
        """Return a step's output: the tokens from `first` on, and their text."""
        sequence = self.sequence
        return RequestOutput(
            request_id=sequence.index,
            token_ids=tuple(sequence.generated[first:]),
            text=text,
            completion=completion,
            logprobs=self._reported(first),
        )

    def _reported(self, first: int) -> tuple[TokenLogprobs, ...] | None:
        return None if self.sequence.params.logprobs is None else tuple(self._logprobs[first:])

    def abort(self) -> Completion:
        """End here and return the outcome, with the tokens that there are."""
        self.sequence.finish_reason = self.sequence.finish_reason or "abort"
        completion = self.completion()
        assert completion is not None
        return completion

    def completion(self) -> Completion | None:
        """Return the outcome, or None while there is more to come."""
        sequence = self.sequence
        if sequence.finish_reason is None:
            return None
        return Completion(
            prompt_token_ids=tuple(sequence.prompt),
            token_ids=tuple(sequence.generated),
            text="".join(self._text),
            finish_reason=sequence.finish_reason,
            max_new_tokens=sequence.params.max_new_tokens,
            num_cached_tokens=sequence.num_cached,
            logits=torch.stack(self._logits) if self._logits else None,
            logprobs=self._reported(0),
            failure=self._failure,
        )

    @property
    def _failure(self) -> str | None:
        constraint = self.sequence.constraint
        return None if constraint is None else constraint.failure

    def _decode(self, token: int) -> str:
        detokenizer, sequence = self._detokenizer, self.sequence
        if detokenizer is None:
            return ""
        # A stop token ends the text and is not part of it.
        piece = "" if token in sequence.stop_token_ids else detokenizer.push(token)
        if detokenizer.stopped_by is not None:
            sequence.finish_reason = "stop"
        return piece + detokenizer.flush() if sequence.finish_reason is not None else piece
