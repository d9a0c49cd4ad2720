"""Requests that come at any time, against the model alone: what models served in another way share in their tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.engine.config import SamplingParams
from core.engine.inspect.attention import implementation
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion


def alone(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that the model's own forward gives, without any cache."""
    tokens = list(prompt)
    with implementation(engine.loaded.model, engine.native_attention), torch.no_grad():
        for _ in range(count):
            ids = torch.tensor([tokens])
            tokens.append(int(engine.loaded.model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def served_at_any_time(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> dict[int, Completion]:
    """Serve one prompt more in each step, the last a step late, so that it finds what the one before it has computed.

    Asserts that prompts were cut, shared steps with generation, and found a beginning in the cache.
    """
    before = engine.stats()
    coming, places, found = list(enumerate(prompts)), dict[int, int](), dict[int, Completion]()
    for turn in range(400):
        if coming and turn != 4:
            index, prompt = coming.pop(0)
            places[engine.add_request(prompt, params)] = index
        for output in engine.step():
            if output.completion is not None:
                found[places[output.request_id]] = output.completion
        if not coming and not engine.has_unfinished:
            break
    after = engine.stats()
    assert after.chunked > before.chunked and after.mixed_steps > before.mixed_steps and after.reused > before.reused
    return found
