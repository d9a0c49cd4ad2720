"""One sequence being generated: its tokens, its cache blocks, and its random numbers."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from core.engine.config import SamplingParams
from core.engine.steps.speculation import Ngrams

FinishReason = Literal["stop", "length"]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was generated from it so far.

    index: a number no other sequence of the engine has. generator: of the numbers it is sampled by; None if greedy.
    blocks: its cache blocks, in order. num_computed: tokens whose keys and values are in the cache. prompt_ids: the
    prompt as an int64 array, which is made unless given as `array`.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    generator: torch.Generator | None = None
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: FinishReason | None = None
    ngrams: Ngrams = field(default_factory=Ngrams)
    array: InitVar[np.ndarray[Any, Any] | None] = field(default=None, kw_only=True)
    prompt_ids: np.ndarray[Any, Any] = field(init=False)
    _uniforms: list[float] = field(default_factory=list)

    def __post_init__(self, array: np.ndarray[Any, Any] | None) -> None:
        self.prompt_ids = np.array(self.prompt, dtype=np.int64) if array is None else array

    def __len__(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def num_pending(self) -> int:
        """Tokens not computed yet: of the prompt at first, later the one token sampled last."""
        return len(self) - self.num_computed

    @property
    def in_prompt(self) -> bool:
        """Whether a part of the prompt is still to be computed."""
        return self.num_computed < len(self.prompt)

    def pending(self, count: int | None = None) -> list[int]:
        """Return the tokens not computed yet, or the first `count` of them."""
        done = self.num_computed - len(self.prompt)
        found = self.generated[done:] if done >= 0 else self.prompt[self.num_computed :] + self.generated
        return found[:count]

    def uniform(self, index: int) -> float:
        """Return the number in [0, 1) by which generated token `index` is sampled; asking twice gives it twice.

        One number per token, in order, on the host: so a sequence's tokens depend neither on which others share its
        batch nor on drafts, whose numbers are drawn early and used when their place is really reached.
        """
        assert self.generator is not None  # a sequence that is sampled is made with one
        while len(self._uniforms) <= index:
            self._uniforms.append(float(torch.rand(1, generator=self.generator)))
        return self._uniforms[index]
