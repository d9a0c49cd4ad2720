"""Models that can't be traced: the engine runs them segmented, by the same calls, and says why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import TraceError
from tests.recording import acme
from tests.support import cpu

PROMPTS = ([3, 4, 5, 6, 7, 8, 9], [20, 21])
CONFIG = EngineConfig(
    max_num_seqs=2,
    max_model_len=32,
    decode_buckets=(2,),
    prefill_buckets=(16,),
    sampling=("greedy",),
    options=CompileOptions(lowering="inline"),
)


def own_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids = torch.tensor([tokens])
            tokens.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_dbrx_runs_segmented_on_a_device_with_graphs_and_the_report_says_why() -> None:
    loaded = build_model(tiny_config("dbrx"), torch_device=torch.device("cpu"), dtype=torch.float32)
    expected = [own_tokens(loaded.model, prompt, 8) for prompt in PROMPTS]
    with Engine(loaded, acme(), CONFIG) as engine:
        completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))
        report = engine.report()
    assert [list(c.token_ids) for c in completions] == expected
    assert report.modes == {"decode": "segmented", "prefill": "segmented"}
    reasons = [note for note in report.notes if "instead of" in note]
    assert len(reasons) == 2 and all("it can't be traced" in reason for reason in reasons)
    assert any("runs eagerly between graphs" in note and "ffn" in note for note in report.notes)
    assert all(bucket.num_graphs == len(bucket.eager) + 1 > 2 for bucket in report.buckets)
    assert sum(report.replays.values()) == 8 and report.fallbacks == {}
    assert not any("not checked" in note for note in report.notes)


@pytest.mark.slow
def test_without_such_graphs_it_runs_eagerly_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    loaded = build_model(tiny_config("dbrx"), torch_device=torch.device("cpu"), dtype=torch.float32)
    expected = own_tokens(loaded.model, PROMPTS[0], 4)
    with caplog.at_level(logging.WARNING), Engine(loaded, cpu(), CONFIG) as engine:
        (completion,) = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert engine.report().modes == {"decode": "off", "prefill": "off"}
    assert list(completion.token_ids) == expected
    assert "decode runs 'off' instead of 'compile'" in caplog.text


def test_strict_it_is_refused() -> None:
    loaded = build_model(tiny_config("dbrx", n_layers=1), torch_device=torch.device("cpu"), dtype=torch.float32)
    config = EngineConfig(max_num_seqs=1, max_model_len=32, options=CompileOptions(lowering="inline", strict=True))
    with pytest.raises(TraceError):
        Engine(loaded, acme(), config)
