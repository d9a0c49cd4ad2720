"""The check that an engine of `deterministic="batch"` is what it says, on this machine and with this model.

What is declared batch-invariant is tested by the conformance suite, for each implementation by itself. Here the whole
of a model runs: a prompt with others in its batch, and the same prompt alone, most of it found in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.engine.config import SamplingParams
from core.engine.models.loading import LoadedModel
from core.errors import ModelError

_PROMPT = 53
"""Tokens of the prompt that is compared: three blocks of the cache and a part of one, and no multiple of a vector."""
_OTHERS = 7
"""Sequences beside it at most."""
_TOKENS = 3


def check_batches(generate: Callable[..., Any], loaded: LoadedModel, max_model_len: int, max_num_seqs: int) -> None:
    """Raise `ModelError` where a prompt's logits depend on its batch or on how much of it is computed at once.

    generate: the engine's, whose counts hold these steps too.
    """

    def ids(index: int, length: int) -> list[int]:
        return [(7 + 13 * index + 5 * place * place) % loaded.vocab_size for place in range(length)]

    def logits(prompts: list[list[int]], place: int) -> Tensor:
        params = SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True)
        found: Tensor = generate(prompts, params, collect_logits=True)[place].logits
        return found

    length = min(_PROMPT, max_model_len - _TOKENS)
    if length < 1:
        return
    prompt = ids(0, length)
    others = [ids(1 + i, 1 + (11 * i) % length) for i in range(min(_OTHERS, max_num_seqs - 1))]
    first = logits([*others, prompt], -1)
    for batch in ([prompt], [prompt, *others]):
        found = logits(batch, 0)
        if not torch.equal(found, first):
            most = float((found.double() - first.double()).abs().max())
            raise ModelError(
                f'{type(loaded.model).__name__} with deterministic="batch"',
                found=f"its logits depend on the batch, by up to {most:.2g}: something that is declared "
                "batch-invariant is not, with this model on this machine",
                remedy="run the conformance suite (cases ops/*/*/batches), or leave deterministic out",
            )
