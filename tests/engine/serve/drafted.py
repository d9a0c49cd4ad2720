"""Tiny models that draft for each other, and the tokens of a sequence by a forward that has nothing of the engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.inspect.attention import implementation
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sampling import make_generator, next_tokens, sampling_row
from core.engine.steps.sequence import Sequence as EngineSequence

VOCAB, MAX_LEN = 160, 48
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=MAX_LEN,
    block_size=4,
    cache_tokens=2 * MAX_LEN,
    decode_buckets=(4,),
    prefill_buckets=(16,),
    speculative=3,
    options=CompileOptions(lowering="inline", strict=True, cache=False),
)


def tiny(model_type: str = "llama", seed: int = 0, **changes: Any) -> LoadedModel:
    config = tiny_config(model_type, **{"vocab_size": VOCAB, **changes})
    return build_model(config, torch_device=torch.device("cpu"), dtype=torch.float32, seed=seed)


def nearly(loaded: LoadedModel, noise: float) -> LoadedModel:
    """Return a copy whose weights are a little different, so that some of its drafts are right."""
    model = copy.deepcopy(loaded.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return replace(loaded, model=model)


def own_tokens(engine: Engine, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Return what the served model's own forward gives after the prompt and after each but the last of these tokens."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    with torch.no_grad(), implementation(engine.loaded.model, engine.native_attention):
        logits = engine.loaded.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    numbers = EngineSequence(0, list(prompt), params, make_generator(params))
    rows = [sampling_row(params, 0.0 if params.greedy else numbers.uniform(i)) for i in range(len(tokens))]
    return next_tokens(logits, torch.tensor(rows), "random").tolist()
