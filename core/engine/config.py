"""The settings of generation: sampling and stopping, checked once when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard

from core.errors import UsageError

Phase = Literal["prefill", "decode", "verify"]
"""prefill: a step that holds tokens of any prompt. decode: exactly one token of each sequence, the one sampled last.
verify: the same with drafts behind some of them."""
Sampling = Literal["greedy", "random", "shaped"]
"""How a graph chooses tokens: always the most likely one, or each row by its own parameters, or these from logits with
each row's own penalties, biases and `min_p`. Each can do what those before it can."""
PHASES = ("prefill", "decode")
"""Phases whose graphs `core explain` shows and `core bisect` searches."""
CACHES = ("auto", "paged", "static")
KV_CACHE_DTYPES = ("auto", "fp8")
"""How keys and values are kept: as the model computes them, or as codes of half the size."""

OWN_HEADS = "self"
"""Stands for the heads in the served model's own checkpoint, where the folder of a draft model could."""

MIN_TEMPERATURE = 1e-5
"""Below this temperature a softmax in fp32 equals the argmax up to ties; 0 gives the argmax exactly."""

MAX_LOGPROBS = 20
"""Most alternatives to a token that are reported."""

_MIN_REPETITION, _MAX_REPETITION = 1e-30, 1e30
"""By a penalty beyond these a logit is divided into infinity, or a logit of 0 multiplied into NaN, in fp32."""
_MAX_REAL = (2 - 2**-23) * 2.0**127
"""The largest number of fp32, in which every setting reaches the device."""
_MAX_COUNT = 2**63 - 1

# torch.Generator.manual_seed takes signed and unsigned 64-bit values.
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen and when it ends; raises `UsageError` for a value out of range."""

    max_new_tokens: int = 64
    #: The divisor of the logits; 0 always takes the most likely token.
    temperature: float = 0.0
    #: Keep the k most likely tokens; 0 keeps all.
    top_k: int = 0
    #: Keep the smallest set of most likely tokens whose probability reaches p; 1 keeps all. Applied after `top_k`.
    top_p: float = 1.0
    #: The same seed gives the same tokens for the same logits; None draws a fresh one.
    seed: int | None = None
    #: Strings that end the text and are not part of it: one, or several. Lists here and below become tuples.
    stop: str | list[str] | tuple[str, ...] = ()
    #: Ids that end the sequence besides the model's own.
    stop_token_ids: tuple[int, ...] = ()
    #: Do not end at the model's own stop ids.
    ignore_eos: bool = False
    #: Drop tokens that are less probable than this share of the most probable one's; 0 drops none. Applied at the
    #: temperature, before `top_k`.
    min_p: float = 0.0
    #: Subtracted from the logits of tokens that the answer already has.
    presence_penalty: float = 0.0
    #: Subtracted from the logits of the answer's tokens, once per occurrence.
    frequency_penalty: float = 0.0
    #: Divides positive logits of tokens that prompt or answer have, and multiplies negative ones; 1 changes nothing.
    repetition_penalty: float = 1.0
    #: Token ids with what is added to their logits; a mapping or lists become pairs.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: No stop token ends the sequence before it has this many tokens; stop strings still do.
    min_tokens: int = 0
    #: Report the log-probability of each token and of so many of the most likely ones; None reports nothing.
    logprobs: int | None = None
    #: Priority; smaller numbers join first and keep their cache longer.
    priority: int = 0
    #: A JSON schema, as JSON, that the text has to match: by llguidance, an extra. Not with `regex` or `ignore_eos`.
    json_schema: str | None = None
    #: A regular expression that the whole text has to match; likewise.
    regex: str | None = None

    def __post_init__(self) -> None:
        self._make_tuples()
        heat, ids = self.temperature, self.stop_token_ids
        rules: dict[str, tuple[bool, str]] = {
            "max_new_tokens": (_is_int(self.max_new_tokens) and self.max_new_tokens >= 1, "an int >= 1"),
            "temperature": (
                _is_real(heat) and (heat == 0 or heat >= MIN_TEMPERATURE),
                f"0 (greedy) or a number >= {MIN_TEMPERATURE:g} that fp32 holds",
            ),
            "top_k": (_is_count(self.top_k), "an int >= 0 of at most 64 bits, where 0 keeps every token"),
            "top_p": (_is_real(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            "seed": (
                self.seed is None or (_is_int(self.seed) and _MIN_SEED <= self.seed <= _MAX_SEED),
                "None or an int of at most 64 bits",
            ),
            "stop": (
                isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
                "a non-empty string, or a tuple of such",
            ),
            "stop_token_ids": (
                isinstance(ids, tuple) and all(map(_is_count, ids)),
                "a tuple of ints >= 0 of at most 64 bits",
            ),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
            "min_p": (_is_real(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]"),
            "presence_penalty": (_is_penalty(self.presence_penalty), "a number in [-2, 2]"),
            "frequency_penalty": (_is_penalty(self.frequency_penalty), "a number in [-2, 2]"),
            "repetition_penalty": (
                _is_real(self.repetition_penalty) and _MIN_REPETITION <= self.repetition_penalty <= _MAX_REPETITION,
                f"a number from {_MIN_REPETITION:g} to {_MAX_REPETITION:g}, where 1 changes nothing",
            ),
            "logit_bias": (_is_bias(self.logit_bias), "a tuple of pairs, a token id and a number in [-100, 100]"),
            "min_tokens": (_is_count(self.min_tokens), "an int >= 0 of at most 64 bits"),
            "logprobs": (
                self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
                f"None or an int from 0 to {MAX_LOGPROBS}",
            ),
            "priority": (
                _is_int(self.priority) and -(2**31) <= self.priority < 2**31,
                "an int of at most 32 bits, where smaller ones are served first",
            ),
            "json_schema": (_is_text(self.json_schema), "None or a str"),
            "regex": (
                _is_text(self.regex) and (self.regex is None or self.json_schema is None),
                "None or a str, alone",
            ),
        }
        if (self.json_schema is not None or self.regex is not None) and self.ignore_eos:
            rules["ignore_eos"] = (False, "False with json_schema or regex, which say where the text may end")
        for name, (holds, wanted) in rules.items():
            if not holds:
                asked = f"sample with {name}={getattr(self, name)!r}"
                raise UsageError(asked, found=f"{name} must be {wanted}", remedy=f"pass {wanted}")

    def _make_tuples(self) -> None:
        """Make tuples of the other ways to write several values."""
        if isinstance(self.stop, str) and self.stop:
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        for name in ("stop", "stop_token_ids", "logit_bias"):
            value = getattr(self, name)
            if value is None or isinstance(value, list | set | frozenset):
                object.__setattr__(self, name, tuple(value or ()))
        if isinstance(self.logit_bias, tuple) and any(isinstance(pair, list) for pair in self.logit_bias):
            pairs = (tuple(pair) if isinstance(pair, list) else pair for pair in self.logit_bias)
            object.__setattr__(self, "logit_bias", tuple(pairs))

    @property
    def shaped(self) -> bool:
        """Whether the logits of all its tokens are changed before a choice (`core.engine.steps.penalties`)."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalised or self.logit_bias or self.constrained or (self.min_p and not self.greedy))

    @property
    def constrained(self) -> bool:
        """Whether a grammar says which tokens may follow."""
        return self.json_schema is not None or self.regex is not None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no random number is drawn."""
        return self.temperature == 0


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_penalty(value: object) -> bool:
    return _is_real(value) and -2 <= value <= 2  # type: ignore[operator]


def _is_bias(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and _is_count(pair[0])
        and (_is_real(pair[1]) and -100 <= pair[1] <= 100)
        for pair in value
    )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    """Tell whether this is a number of something that a step can hand to the device: a larger one would fail the step,
    and with it the requests of others."""
    return _is_int(value) and 0 <= value <= _MAX_COUNT


def _is_real(value: object) -> bool:
    # Python compares ints of any size; NaN compares with nothing.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_REAL
