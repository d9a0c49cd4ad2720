"""One sequence being generated: its tokens, its cache blocks, and its random numbers."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from core.engine.config import SamplingParams
from core.engine.steps.speculation import Ngrams

FinishReason = Literal["stop", "length", "abort"]
Shaping = Literal["none", "device", "host"]
"""Whether and where the logits of a sequence's next tokens are changed. host: because the device has no room or no rule
for it."""
NULL_SLOT = 0
"""The slot of a sequence that has none; of recurrent states zeros for ever, which padding reads."""
NUM_SLOTS = 32
"""Tokens of a sequence whose logits the device can add something to."""
_versions = count(1)


class Constraint(Protocol):
    """The grammar that the text of a sequence has to match."""

    #: Why the grammar can no longer be followed; the sequence then ends.
    failure: str | None

    def allowed(self, drafts: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
        """Return for each token id whether it may follow the sequence and these drafts, (vocabulary,) bool.

        None if the grammar refuses one of the drafts.
        """

    def push(self, token: int) -> bool:
        """Take the next token, and tell whether nothing may follow it."""


class TokenLogprobs(NamedTuple):
    """The model's log-probabilities (natural logarithm, before all penalties) of a token and its alternatives."""

    token_id: int
    logprob: float
    #: The most likely tokens with their log-probabilities, as many as asked for.
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was generated from it so far."""

    #: A number that no other sequence of the engine has, larger than that of those that came before it.
    index: int
    prompt: list[int]
    params: SamplingParams
    #: Draws the numbers by which tokens are sampled; None for a greedy sequence.
    generator: torch.Generator | None = None
    generated: list[int] = field(default_factory=list)
    #: Its cache blocks in order, for each group of layers; 0 stands for those that no later token needs.
    tables: list[list[int]] = field(default_factory=list)
    #: The slot of its recurrent states, or its row of the static cache counted from 1; 0 for none.
    slot: int = NULL_SLOT
    #: Tokens whose keys and values are in the cache once the steps under way are done.
    num_computed: int = 0
    #: Tokens that steps under way will give.
    num_awaited: int = 0
    #: Tokens whose keys and values are in the cache now.
    num_settled: int = 0
    #: Tokens whose keys and values it found in the cache when it joined.
    num_reused: int = 0
    #: Tokens of the prompt that the cache held when it first joined.
    num_cached: int = 0
    #: Whether a step has computed any of it.
    has_begun: bool = False
    #: How often it lost its cache to another sequence, and is computed again from its first token.
    num_preemptions: int = 0
    #: Names of its full cache blocks by content, as far as they were asked for.
    block_keys: list[bytes] = field(default_factory=list)
    #: How many of its blocks others can find by content.
    num_published: int = 0
    #: First part of the key of its first block: sequences with different salts share no blocks.
    cache_salt: bytes = b""
    #: The slot of its adapter, 0 for none (`core.engine.lora`).
    adapter: int = 0
    #: Changes with `tables`, and is unique among sequences.
    version: int = field(default_factory=_versions.__next__)
    finish_reason: FinishReason | None = None
    #: The grammar that its text has to match.
    constraint: Constraint | None = None
    #: Tokens that end it.
    stop_token_ids: frozenset[int] = frozenset()
    #: Cached, like the next field, since each step reads it for each sequence; see `update_shaping`.
    shaping: Shaping = field(init=False)
    #: Whether the host has to see its logits before its next step.
    wants_host: bool = field(init=False)
    #: Tokens that the device holds of it for its penalties, where it has a row there.
    num_noted: int = 0
    #: Log-probabilities of the rows of its last step, if asked for.
    reported: list[TokenLogprobs] = field(default_factory=list)
    ngrams: Ngrams = field(default_factory=Ngrams)
    #: The prompt as an int64 array, where the caller has one already.
    array: InitVar[np.ndarray[Any, Any] | None] = field(default=None, kw_only=True)
    #: The prompt as an int64 array.
    prompt_ids: np.ndarray[Any, Any] = field(init=False)
    _uniforms: list[float] = field(default_factory=list)

    def __post_init__(self, array: np.ndarray[Any, Any] | None) -> None:
        self.update_shaping()
        self.prompt_ids = np.array(self.prompt, dtype=np.int64) if array is None else array

    def __len__(self) -> int:
        return len(self.prompt) + len(self.generated) + self.num_awaited

    @property
    def num_known(self) -> int:
        """Tokens that the host knows."""
        return len(self.prompt) + len(self.generated)

    @property
    def num_pending(self) -> int:
        """Tokens not computed yet: of the prompt at first, later the one token sampled last."""
        return len(self) - self.num_computed

    @property
    def num_slots(self) -> int:
        """Tokens whose logits get an addend: biases, and stop tokens until `min_tokens` is reached."""
        return len(self.params.logit_bias) + (len(self.stop_token_ids) if self.params.min_tokens else 0)

    def update_shaping(self) -> None:
        """Set `shaping` and `wants_host`; to be called when `stop_token_ids` or `constraint` change, and when the
        sequence reaches `min_tokens`."""
        self.shaping = "none"
        if self.params.shaped or len(self.generated) < self.params.min_tokens:
            self.shaping = "host" if self.params.constrained or self.num_slots > NUM_SLOTS else "device"
        self.wants_host = self.shaping == "host" or self.params.logprobs is not None

    @property
    def in_prompt(self) -> bool:
        """Whether more is to be computed than the token sampled last: a prompt, or all of a preempted sequence."""
        done, prompt = self.num_computed, len(self.prompt)
        return done < prompt or done < prompt + len(self.generated) + self.num_awaited - 1

    @property
    def num_left(self) -> int:
        """Tokens that it may have besides those that are known or under way."""
        return self.params.max_new_tokens - len(self.generated) - self.num_awaited

    @property
    def has_all(self) -> bool:
        """Whether no further token is needed: the last one is known or under way."""
        return self.num_left <= 0

    def token(self, position: int) -> int:
        """Return the token at a position, which the host knows."""
        done = position - len(self.prompt)
        return self.prompt[position] if done < 0 else self.generated[done]

    def tokens(self, first: int, count: int) -> list[int]:
        """Return the tokens at positions first, first + 1, …; 0 for those that are not known yet."""
        done = first - len(self.prompt)
        if done >= 0:
            found = self.generated[done : done + count]
        else:
            found = self.prompt[first : first + count] + self.generated[: max(done + count, 0)]
        return found + [0] * (count - len(found))

    def twin(self, vocab_size: int, first: int = 0) -> Sequence:
        """Return a sequence for a model that drafts for this one: the same tokens, sampled by the same numbers.

        vocab_size: of that model; it is given its last token for those that it does not know. first: of the prompt's
        tokens, where the twin begins.
        """
        last = vocab_size - 1
        ids = np.minimum(self.prompt_ids[first:], last)
        prompt = self.prompt[first:] if max(self.prompt) <= last else ids.tolist()
        generated = [min(token, last) for token in self.generated]
        return Sequence(self.index, prompt, self.params, self.generator, generated, _uniforms=self._uniforms, array=ids)

    def table_changed(self) -> None:
        """Take a new version, so that copies of the tables are renewed."""
        self.version = next(_versions)

    def uniform(self, index: int) -> float:
        """Return the number in [0, 1) by which generated token `index` is sampled; asking twice gives it twice.

        One number per token, in order, on the host: so a sequence's tokens depend neither on which others share its
        batch nor on drafts, whose numbers are drawn early and used when their place is really reached.
        """
        assert self.generator is not None  # every sampled sequence has a generator
        while len(self._uniforms) <= index:
            self._uniforms.append(float(torch.rand(1, generator=self.generator)))
        return self._uniforms[index]
