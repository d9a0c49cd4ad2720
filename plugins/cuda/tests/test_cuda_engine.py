"""The engine on an NVIDIA GPU: sampling and verification in graphs, and models that can't be traced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import core
from core.device import Device

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.engine.config import SamplingParams
from core.engine.models.assets import embedded_model
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]
PROMPTS = [
    "If the argument is",
    "The list of the list of the list",
    "a",
    "The Python interpreter is a program that",
] * 3


@pytest.fixture(scope="module")
def device() -> Device:
    return core.select_device("cuda")


def params() -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=6 + 3 * index, ignore_eos=True)
        if index % 2
        else SamplingParams(max_new_tokens=6 + 3 * index, temperature=0.8, top_p=0.9, top_k=20, seed=index)
        for index in range(len(PROMPTS))
    ]


def test_tokens_are_the_same_with_speculation_chunks_and_sampling_in_the_graph(device: Device) -> None:
    generated = []
    for config in (
        EngineConfig(max_num_seqs=4, max_model_len=128, options=core.CompileOptions(strict=True)),
        EngineConfig(
            max_num_seqs=4,
            max_model_len=128,
            prefill_buckets=(8,),
            speculative=3,
            options=core.CompileOptions(strict=True),
        ),
        EngineConfig(max_num_seqs=4, max_model_len=128, options=core.CompileOptions(mode="off")),
    ):
        with Engine.load(embedded_model(), device, config, dtype=torch.float32) as engine:
            generated.append([c.token_ids for c in engine.generate(PROMPTS, params())])
            report, stats = engine.report(), engine.stats()
            if config.options.mode is None:
                assert set(report.modes.values()) == {"full"}
                assert (stats.ahead > 20) == (not config.speculative)
                assert report.notes == () and report.fallbacks == {} and report.compiles == {}
            assert (stats.accepted["ngram"] > 10 and stats.chunked > 3) == bool(config.speculative)
    assert generated[0] == generated[1] == generated[2]


def test_tokens_are_the_same_with_a_draft_model_in_graphs_of_its_own(device: Device) -> None:
    strict = core.CompileOptions(strict=True)
    plain = EngineConfig(max_num_seqs=4, max_model_len=128, prefill_buckets=(8,), options=strict)
    with Engine.load(embedded_model(), device, plain, dtype=torch.float32) as engine:
        expected = [each.token_ids for each in engine.generate(PROMPTS, params())]
    drafted = replace(plain, speculative=3, draft_model=embedded_model())
    with Engine.load(embedded_model(), device, drafted, dtype=torch.float32) as engine:
        assert [each.token_ids for each in engine.generate(PROMPTS, params())] == expected
        report, stats = engine.drafter.report(), engine.stats()
    assert report is not None and set(report.modes.values()) == {"full"}
    assert report.fallbacks == {} and report.compiles == {} and sum(report.replays.values()) > 20
    # Steps of other sizes may round otherwise, and a number that lies at a boundary then gives another draft.
    assert stats.accepted["model"] > 0.9 * stats.drafted["model"] > 90


def test_dbrx_runs_segmented_and_gives_its_own_tokens(device: Device) -> None:
    loaded = build_model(tiny_config("dbrx"), torch_device=device.torch_device, dtype=torch.float32)
    prompt = [3, 4, 5, 6, 7, 8, 9]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(8):
            ids = torch.tensor([tokens], device=device.torch_device)
            tokens.append(int(loaded.model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    config = EngineConfig(
        max_num_seqs=2, max_model_len=32, decode_buckets=(2,), prefill_buckets=(16,), sampling=("greedy",)
    )
    with Engine(loaded, device, config) as engine:
        (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=8, ignore_eos=True))
        report = engine.report()
    assert list(completion.token_ids) == tokens[len(prompt) :]
    assert report.modes == {"decode": "segmented", "prefill": "segmented"}
    assert any("it can't be traced" in note for note in report.notes)
    assert any("experts runs eagerly between graphs" in note for note in report.notes)
