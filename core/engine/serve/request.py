"""What a caller asked for, from its first token to its completion: text, stops, logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.engine.models.loading import LoadedModel
from core.engine.serve.detokenize import Detokenizer
from core.engine.steps.sequence import FinishReason, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What became of one prompt. text is "" without a tokenizer; logits, if collected, is (len(token_ids), vocabulary)
    on the host, the logits each token was chosen from."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logits: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What one step gave one request: its new tokens, the text that became certain, the completion if it has ended."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None


class Request:
    """A sequence with its text and, if they are collected, its logits."""

    def __init__(self, sequence: Sequence, loaded: LoadedModel, *, collect_logits: bool = False) -> None:
        """Begin; raise `ModelError` where the text may end at a string and there is no tokenizer."""
        params = sequence.params
        if params.stop:
            loaded.require_tokenizer()
        self.sequence = sequence
        self.collect_logits = collect_logits
        self._stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else loaded.stop_token_ids)}
        self._detokenizer: Detokenizer | None = None
        if loaded.tokenizer is not None:
            context = sequence.prompt[-1:]
            self._detokenizer = Detokenizer(loaded.tokenizer, stop=params.stop, context=context)
        self._text: list[str] = []
        self._logits: list[Tensor] = []

    def push(self, token: int, logits: Tensor | None) -> str:
        """Take the next token and the logits it is from, note whether it is the last, and return the certain text."""
        sequence = self.sequence
        sequence.generated.append(token)
        if logits is not None:
            self._logits.append(logits)
        if token in self._stop_token_ids:
            sequence.finish_reason = "stop"
        elif len(sequence.generated) >= sequence.params.max_new_tokens:
            sequence.finish_reason = "length"
        piece = self._decode(token)
        if piece:
            self._text.append(piece)
        return piece

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
            logits=torch.stack(self._logits) if self._logits else None,
        )

    def _decode(self, token: int) -> str:
        detokenizer, sequence = self._detokenizer, self.sequence
        if detokenizer is None:
            return ""
        # A stop token ends the text and is not part of it.
        piece = "" if sequence.finish_reason == "stop" else detokenizer.push(token)
        if detokenizer.stopped_by is not None:
            sequence.finish_reason = "stop"
        return piece + detokenizer.flush() if sequence.finish_reason is not None else piece
