"""Break points inside a served model: what a step sets around a call is there at replays, which set nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from tests.engine.lora.folders import ATTENTION, make_layers, save_adapter
from tests.recording import acme

PROMPTS = [[5, 6, 7], [20, 21, 22, 23, 24, 25, 26], [9, 4]]
PARAMS = SamplingParams(max_new_tokens=5, ignore_eos=True)


def tokens(model_type: str, *eager: str, adapter: Path | None = None) -> list[list[int]]:
    """Return what an engine generates; eager: its break points, none for a decode that is not captured."""
    device, fields = acme(), dict[str, Any](max_num_seqs=4, max_model_len=48)
    loaded = build_model(tiny_config(model_type), torch_device=device.torch_device, dtype=torch.float32)
    if adapter is not None:
        save_adapter(adapter, make_layers(loaded.model, ATTENTION, rank=4, seed=0), rank=4, alpha=64)
        fields["max_loras"] = 1
    options = CompileOptions(eager=eager, mode={"prefill": "off", "decode": "segmented" if eager else "off"})
    with Engine(loaded, device, EngineConfig(**fields, options=options)) as engine:
        if adapter is not None:
            engine.load_lora("one", adapter)
        found = engine.generate(PROMPTS, PARAMS, lora=None if adapter is None else "one")
        return [list(each.token_ids) for each in found]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model_type", "eager"),
    [
        ("llama", "model.layers.*.self_attn"),  # the tables of the step
        ("bart", "model.decoder"),  # positions that the model counts itself
        ("mamba2", "backbone.layers.*.mixer"),  # slots of states
        ("falcon", "transformer.h.*.self_attention"),  # rows of a static cache
    ],
)
def test_replays_around_break_points_see_their_own_step(model_type: str, eager: str) -> None:
    assert tokens(model_type, eager) == tokens(model_type)


@pytest.mark.slow
def test_adapters_reach_break_points(tmp_path: Path) -> None:
    found = tokens("llama", "model.layers.*.self_attn", adapter=tmp_path / "adapter")
    assert found == tokens("llama", adapter=tmp_path / "adapter")
    assert found != tokens("llama")
