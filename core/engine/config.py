"""What a caller may ask of generation: sampling and stopping, checked once when it is stated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.errors import UsageError

MIN_TEMPERATURE = 1e-5
"""Below this a softmax in fp32 is the argmax up to ties; ask for 0 and get it exactly."""

# torch.Generator.manual_seed takes signed and unsigned 64-bit values.
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen and when it ends.

    temperature: 0 is greedy; otherwise the logits are divided by it. top_k: keep the k most likely tokens, 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches p, 1 keeps all; applied after top_k.
    seed: the same seed gives the same tokens for the same logits, None draws a fresh one. stop: strings that end the
    text and are not part of it. stop_token_ids: ids that end the sequence besides the model's own. ignore_eos: do not
    end at the model's own stop ids. Raises UsageError for a value out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(_is_int(self.max_new_tokens) and self.max_new_tokens >= 1, self, "max_new_tokens", "an int >= 1")
        _require(
            _is_real(self.temperature) and (self.temperature == 0 or self.temperature >= MIN_TEMPERATURE),
            self,
            "temperature",
            f"0 (greedy) or a finite number >= {MIN_TEMPERATURE:g}",
        )
        _require(_is_int(self.top_k) and self.top_k >= 0, self, "top_k", "an int >= 0, where 0 keeps every token")
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, self, "top_p", "a number in (0, 1]")
        _require(
            self.seed is None or (_is_int(self.seed) and _MIN_SEED <= self.seed <= _MAX_SEED),
            self,
            "seed",
            "None or an int of at most 64 bits",
        )
        # A bare string is a sequence of strings too, and would stop at each of its letters.
        _require(
            isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            self,
            "stop",
            "a tuple of non-empty strings",
        )
        _require(
            isinstance(self.stop_token_ids, tuple) and all(_is_int(i) and i >= 0 for i in self.stop_token_ids),
            self,
            "stop_token_ids",
            "a tuple of ints >= 0",
        )
        _require(isinstance(self.ignore_eos, bool), self, "ignore_eos", "True or False")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no random number is drawn."""
        return self.temperature == 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, params: SamplingParams, name: str, wanted: str) -> None:
    if not condition:
        value = getattr(params, name)
        raise UsageError(f"sample with {name}={value!r}", found=f"{name} must be {wanted}", remedy=f"pass {wanted}")
