"""Whole small models of transformers, eager on the simulated device, against the processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import Fp64Mode, judge

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Gemma3": ("Gemma3TextConfig", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "Qwen3Moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
}
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
NUM_STEPS = 3


def make(family: str, attention: str) -> Any:
    """Build one small model with the weights of a fixed seed."""
    name, more = MODELS[family]
    config = getattr(transformers, name)(**SIZES, **more)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the grouped product has no float64
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def logits(model: Any, ids: Tensor, device: str = "cpu") -> Tensor:
    """Prefill, then decode fixed tokens over the cache; returns the logits of all positions."""
    with torch.no_grad():
        out = model(ids.to(device), use_cache=True)
        parts = [out.logits]
        for step in range(NUM_STEPS):
            out = model(ids[:, step : step + 1].to(device), past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
    return torch.cat([part.cpu() for part in parts], 1)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", MODELS)
def test_prefill_and_decode_are_as_near_as_the_processor(family: str, attention: str, dtype: torch.dtype) -> None:
    ids = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(1))
    model = make(family, attention).to(dtype)
    expected = logits(model, ids)
    exact = make(family, attention).to(dtype).double()
    with Fp64Mode():
        reference = logits(exact, ids)
    verdict = judge(logits(model.npu(), ids, "npu"), expected, reference.double())
    assert verdict.passed, verdict.reason
