"""Answers in the shapes of OpenAI's API: whole, or chunk by chunk."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from core.engine.http.errors import ApiError
from core.engine.http.generation import Choice, Generation
from core.engine.http.texts import Texts
from core.engine.http.token_texts import TokenText
from core.engine.serve.request import RequestOutput
from core.engine.steps.sequence import TokenLogprobs

DONE = b"data: [DONE]\n\n"
Names = Mapping[int, TokenText]
"""By token id."""


class Shape(Protocol):
    """How one endpoint words its answers."""

    #: Names of the whole answer and of a chunk.
    whole: str
    chunk: str

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Return what a stream says of a choice before its first token."""

    def delta(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return a choice with a piece of its text."""

    def all(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return a choice with its whole text."""

    def logprobs(
        self, choice: Choice, tokens: Sequence[TokenLogprobs], names: Mapping[int, TokenText]
    ) -> dict[str, Any]:
        """Return how probable some tokens of a choice are, in order."""


class CompletionShape:
    """/v1/completions. echoes: by prompt, what the text begins with."""

    whole = chunk = "text_completion"

    def __init__(self, echoes: Sequence[str], n: int) -> None:
        self._echoes, self._n = echoes, n

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Return the prompt where it is echoed."""
        return self.delta(choice, self._echoes[choice.index // self._n]) if self._echoes else None

    def delta(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return a choice with a piece of its text."""
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}

    def all(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return a choice with its whole text."""
        echo = self._echoes[choice.index // self._n] if self._echoes else ""
        return self.delta(choice, echo + text)

    def logprobs(
        self, choice: Choice, tokens: Sequence[TokenLogprobs], names: Mapping[int, TokenText]
    ) -> dict[str, Any]:
        """Return parallel lists; offsets count characters of the tokens, each taken alone."""
        texts = [names[each.token_id] for each in tokens]
        *offsets, choice.num_chars = accumulate((len(each.text) for each in texts), initial=choice.num_chars)
        return {
            "tokens": [each.label for each in texts],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [{names[token].label: logprob for token, logprob in each.top} for each in tokens],
            "text_offset": offsets,
        }


class ChatShape:
    """/v1/chat/completions."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Return whose turn it is."""
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def delta(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return a choice with a piece of its text."""
        return self._chunk(choice, {"content": text} if text else {})

    def all(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return a choice with its whole text."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": None, "finish_reason": None}

    def logprobs(
        self, choice: Choice, tokens: Sequence[TokenLogprobs], names: Mapping[int, TokenText]
    ) -> dict[str, Any]:
        """Return one object for each token."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": names[token].text, "logprob": logprob, "bytes": list(names[token].data)}

        content = [
            entry(each.token_id, each.logprob) | {"top_logprobs": [entry(*pair) for pair in each.top]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    @staticmethod
    def _chunk(choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


class Reply:
    """The answer to one request, of a generation that has begun."""

    def __init__(
        self, generation: Generation, shape: Shape, texts: Texts, model: str, *, id: str, token_ids: bool
    ) -> None:
        self._generation, self._shape, self._texts, self._token_ids = generation, shape, texts, token_ids
        self._head = {"id": id, "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices and return the answer; raises `ApiError` where one of them failed."""
        while await self._generation.take():
            pass
        choices = [await self._whole(choice) for choice in self._generation.choices]
        return {"object": self._shape.whole, **self._head, "choices": choices, "usage": self._generation.usage()}

    async def events(self, *, usage: bool) -> AsyncIterator[bytes]:
        """Yield the chunks as server-sent events, joined where several are ready; a failure is the last event."""
        choices = self._generation.choices
        # Sent with the first text: until then a balancer may give the request to another server.
        begin = b"".join(self._event([first]) for choice in choices if (first := self._first(choice)) is not None)
        try:
            while taken := await self._generation.take():
                if spoken := [await self._delta(*each) for each in taken if self._says_something(each[1])]:
                    yield begin + b"".join(self._event([delta]) for delta in spoken)
                    begin = b""
        except ApiError as error:
            yield begin + _data(error.body())
            return
        yield begin + (self._event([], usage=self._generation.usage()) if usage else b"") + DONE

    def _says_something(self, outputs: list[RequestOutput]) -> bool:
        # Text may be held back; a chunk without any would be noise.
        return self._token_ids or any(each.text or each.completion or each.logprobs for each in outputs)

    def _first(self, choice: Choice) -> dict[str, Any] | None:
        first = self._shape.first(choice)
        if first is not None and self._token_ids:
            first["prompt_token_ids"] = list(choice.prompt.token_ids)
        return first

    async def _delta(self, choice: Choice, outputs: list[RequestOutput]) -> dict[str, Any]:
        delta = self._shape.delta(choice, "".join(each.text for each in outputs))
        completion = outputs[-1].completion
        if completion is not None:
            delta["finish_reason"] = completion.finish_reason
        reported = [entry for each in outputs for entry in each.logprobs or ()]
        if reported:
            delta["logprobs"] = await self._logprobs(choice, reported)
        if self._token_ids:
            delta["token_ids"] = [token for each in outputs for token in each.token_ids]
        return delta

    async def _whole(self, choice: Choice) -> dict[str, Any]:
        completion = choice.completion
        assert completion is not None  # `take` has returned nothing
        whole = self._shape.all(choice, completion.text) | {"finish_reason": completion.finish_reason}
        if completion.logprobs is not None:
            whole["logprobs"] = await self._logprobs(choice, completion.logprobs)
        if self._token_ids:
            whole |= {"prompt_token_ids": list(choice.prompt.token_ids), "token_ids": list(completion.token_ids)}
        return whole

    async def _logprobs(self, choice: Choice, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        ids = {token for each in tokens for token in (each.token_id, *(other for other, _ in each.top))}
        return self._shape.logprobs(choice, tokens, await self._texts.names(ids))

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        return _data({"object": self._shape.chunk, **self._head, "choices": choices, "usage": usage})


def _data(event: dict[str, Any]) -> bytes:
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    # A lone surrogate is a JSON escape and no UTF-8.
    return b"data: " + text.encode("utf-8", errors="replace") + b"\n\n"
