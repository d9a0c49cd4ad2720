"""What clients may send: the fields of OpenAI's API that are served, and a few of vLLM's; every other is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.engine.config import SamplingParams
from core.engine.http.errors import ApiError
from core.errors import UsageError

MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_BIASES = 1024
"""Limits on fields that cost time at each token, in the thread that all sequences share."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "suffix": ("",),
    "tools": ([],),
}
"""Values of fields that are not served which ask for nothing; clients send them as defaults."""

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenIds = list[int]


class _Body(BaseModel):
    """Refuses unknown fields, takes null as "not sent", and never converts a value to fit."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        own = cls.model_fields
        return {
            name: value
            for name, value in body.items()
            if value is not None and not (name not in own and _asks_nothing(name, value))
        }


def _asks_nothing(name: str, value: object) -> bool:
    # Compare types too: in Python False equals 0.
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in _NEUTRAL.get(name, ()))


class StreamOptions(_Body):
    """What a stream holds besides its choices."""

    #: Whether the last chunk counts the tokens.
    include_usage: bool = False


class JsonSchema(_Body):
    """A schema with its name."""

    name: str = ""
    description: str = ""
    #: What llguidance enforces is strict in any case.
    strict: bool = True
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Body):
    """What an answer has to match."""

    kind: Literal["text", "json_object", "json_schema"] = Field(alias="type")
    json_schema: JsonSchema | None = None


class _Generating(_Body):
    """What completions and chats share."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    n: int = Field(1, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    #: By token id, which JSON writes as a string.
    logit_bias: dict[str, float] = Field({}, max_length=MAX_BIASES)
    min_tokens: int = 0
    #: Smaller ones are served first.
    priority: int = 0
    response_format: ResponseFormat | None = None
    #: A regular expression that the whole answer matches.
    guided_regex: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    #: A name that goes into the log.
    user: str | None = Field(None, max_length=256)
    #: Answer with token ids besides the text.
    return_token_ids: bool = False

    @property
    def asked_max_tokens(self) -> tuple[str, int | None]:
        """The field that limits the new tokens, and its value where it was sent."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for the log-probabilities of alternatives, and how many it asks for."""
        raise NotImplementedError

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """Return how tokens are chosen; `ApiError` names the field whose value can't be."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self._biases(),
            "min_tokens": self.min_tokens,
            "priority": self.priority,
            "logprobs": self.num_logprobs[1],
            self.grammar[1]: self.grammar[2],
        }
        for name, value in (*given.items(), ("max_new_tokens", max_new_tokens)):
            try:
                SamplingParams(**{name: value})  # type: ignore[arg-type]
            except UsageError as error:
                names = {"max_new_tokens": self.asked_max_tokens[0], "logprobs": self.num_logprobs[0]}
                param = names.get(name, name)
                message = f"{param}={value!r}: it must be {error.remedy.removeprefix('pass ')}"
                raise ApiError(400, message, param=param, code="invalid_value") from None
        return SamplingParams(max_new_tokens=max_new_tokens, **given)  # type: ignore[arg-type]

    @property
    def grammar(self) -> tuple[str, str, str | None]:
        """The field that says what the answer has to match, the engine's name for that, and its text."""
        asked = self.response_format
        if asked is None or asked.kind == "text":
            return "guided_regex", "regex", self.guided_regex
        schema = {"type": "object"} if asked.json_schema is None else asked.json_schema.schema_
        return "response_format", "json_schema", json.dumps(schema)

    def _biases(self) -> tuple[tuple[int, float], ...]:
        try:
            return tuple((int(token), bias) for token, bias in self.logit_bias.items())
        except ValueError as error:
            raise ApiError(400, f"logit_bias: {error}", param="logit_bias", code="invalid_value") from None

    def check(self) -> None:
        """Raise `ApiError` for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for stream=true alone", param="stream_options", code="invalid_value")
        asked = self.response_format
        if asked is not None and (asked.kind == "json_schema") != (asked.json_schema is not None):
            message = "response_format: json_schema goes with the type 'json_schema' and no other"
            raise ApiError(400, message, param="response_format", code="invalid_value")
        field, _, text = self.grammar
        if text is not None and self.ignore_eos:
            message = f"ignore_eos with {field}, which says where the answer may end"
            raise ApiError(400, message, param="ignore_eos", code="invalid_value")
        if field == "response_format" and self.guided_regex is not None:
            raise ApiError(400, "guided_regex besides response_format", param="guided_regex", code="invalid_value")


class CompletionRequest(_Generating):
    """The body of /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    max_tokens: int = 16
    #: Whether the text begins with the prompt.
    echo: bool = False
    #: How many alternatives to each token are reported, besides the token itself.
    logprobs: int | None = None

    @property
    def asked_max_tokens(self) -> tuple[str, int | None]:
        """The field that limits the new tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for log-probabilities, and of how many alternatives."""
        return "logprobs", self.logprobs

    def check(self) -> None:
        """Raise `ApiError` for fields that contradict each other."""
        super().check()
        if self.echo and self.logprobs is not None:
            message = "echo with logprobs is not supported: the prompt's own are not computed"
            raise ApiError(400, message, param="echo", code="unsupported_parameter")

    def prompts(self) -> list[str | TokenIds]:
        """Return one or several prompts as several."""
        several = isinstance(self.prompt, list) and not all(isinstance(each, int) for each in self.prompt)
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of a chat."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message as templates take it, its parts joined."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatRequest(_Generating):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    #: None for all that the context holds.
    max_completion_tokens: int | None = None
    logprobs: bool = False
    #: How many alternatives to each token are reported, with `logprobs`.
    top_logprobs: int | None = None
    max_tokens: int | None = None

    @property
    def asked_max_tokens(self) -> tuple[str, int | None]:
        """The field that limits the new tokens, and its value where it was sent."""
        if self.max_completion_tokens is not None or self.max_tokens is None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for log-probabilities, and of how many alternatives."""
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raise `ApiError` for fields that contradict each other."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is for logprobs=true alone", param="top_logprobs", code="invalid_value")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "max_tokens is the old name of max_completion_tokens, and differs from it"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")


class TokenizeRequest(_Body):
    """The body of /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeRequest(_Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds
