"""Whole models through the engine on the real torch_npu: captured steps with renewed lengths give eager's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.compilation.report import ProgramReport
from core.device import Device, Mode
from core.engine.check.comparison import compare
from core.engine.config import SamplingParams
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.quantizing import Quantize
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device
from simulator import runtime

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch_npu copies storages by it

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
CONFIGS = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}
PROMPTS = [[3, 4, 5, 6, 7, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99], [9, 10, 11], [200]]
NUM_TOKENS = 17  # a prefill and 16 decode steps, over the end of a block of the cache


@pytest.fixture(scope="module")
def npu() -> Device:
    return select_device("npu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path))


def built(npu: Device, family: str, scheme: str | None = None) -> LoadedModel:
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS[family])(**SIZES)
    loaded = build_model(config, torch_device=npu.torch_device, dtype=torch.float16)
    asked = Quantize.of(scheme, None)
    return loaded if asked is None else asked.apply(loaded)


def config(mode: Mode | None, **options: Any) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=3,
        max_model_len=64,
        decode_buckets=(1, 2, 4),
        prefill_buckets=(32,),
        options=CompileOptions(mode=mode, **options),
    )


def _on_kernels(report: ProgramReport) -> set[str]:
    """Return the canonical ops that every trace computes by the plugin's own implementations."""
    chosen = {(each.op, each.implementation.startswith("npu_")) for trace in report.traces for each in trace.ops}
    return {op for op, own in chosen if own} - {op for op, own in chosen if not own}


@pytest.mark.parametrize(
    ("family", "scheme", "mode"),
    [("llama", None, "full"), ("qwen3", None, None), ("llama", "int8", None), ("qwen3", "int8", "full")],
)
def test_captured_steps_give_eagers_tokens(npu: Device, family: str, scheme: str | None, mode: Mode | None) -> None:
    with Engine(built(npu, family, scheme), npu, config(mode, strict=True)) as engine:
        assert engine.route == "paged"
        runtime.clear()
        comparison = compare(engine, PROMPTS, num_tokens=NUM_TOKENS, rounds=1)
        report = engine.report()
        kinds = {event.kind for event in runtime.log()}
    assert not report.fallbacks and not report.dropped and not report.stand_ins
    assert report.modes == {"decode": "full", "prefill": "full" if mode else "piecewise"}
    assert sum(count for key, count in report.replays.items() if key.phase == "decode") >= NUM_TOKENS - 1
    assert {"replay", "update", "value_write"} <= kinds and not kinds & {"deadlock", "invalid", "not_computed"}
    assert {"core::rotary_attention", "core::rms_norm"} <= _on_kernels(report)
    assert ("core::quantized_linear" in _on_kernels(report)) is (scheme is not None)
    # Where two tokens are nearer to each other than the logits' error, which one comes says nothing: codes make more of
    # these. What captures add, the next test compares in every bit.
    assert comparison.passed and comparison.verdict is not None, comparison
    assert comparison.tokens_equal or scheme is not None, comparison.mismatch


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_renewed_lists_give_the_bits_of_lists_that_are_read(npu: Device, scheme: str | None) -> None:
    """The same kernels on the same buckets, in whole graphs, and with attention between the graphs, as it reads."""
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    found = []
    for mode in ("full", "piecewise"):
        with Engine(built(npu, "qwen3", scheme), npu, config(mode, strict=True)) as engine:
            found.append(engine.generate(PROMPTS, params, collect_logits=True))
            assert set(engine.report().modes.values()) == {mode} and not engine.report().fallbacks
    for whole, parts in zip(*found, strict=True):
        assert whole.token_ids == parts.token_ids and len(whole.token_ids) == NUM_TOKENS
        assert whole.logits is not None and parts.logits is not None and torch.equal(whole.logits, parts.logits)


def test_every_step_is_an_update_of_every_layer(npu: Device) -> None:
    with Engine(built(npu, "llama"), npu, config("full")) as engine:
        engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=2, ignore_eos=True))
        runtime.clear()
        engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=5, ignore_eos=True))
        events = [event for event in runtime.log() if event.kind in ("update", "replay", "launch")]
        updates = [event.name for event in events if event.kind == "update"]
    num_steps = 5
    assert [event.kind for event in events].count("replay") == num_steps
    assert updates == ["aclnnFusedInferAttentionScoreV3"] * SIZES["num_hidden_layers"] * num_steps


def test_sequences_of_a_batch_do_not_depend_on_each_other(npu: Device) -> None:
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    with Engine(built(npu, "qwen3"), npu, config("full")) as engine:
        together = engine.generate(PROMPTS, params)
        for prompt, one in zip(PROMPTS, together, strict=True):
            assert engine.generate([prompt], params)[0].token_ids == one.token_ids
        assert {key.dims[0] for key, count in engine.report().replays.items() if count} >= {1, 4}


def test_an_engine_whose_streams_run_out_serves_with_what_it_has(npu: Device) -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with Engine(built(npu, "llama"), npu, config("full", cache=False)) as engine:
        wanted = [each.token_ids for each in engine.generate(PROMPTS[:1], params)]
    runtime.fail_next(runtime.CAPTURE, 207008, after=3)
    with Engine(built(npu, "llama"), npu, config("full", cache=False)) as engine:
        assert [each.token_ids for each in engine.generate(PROMPTS[:1], params)] == wanted
        report = engine.report()
        assert len(report.buckets) == 3 and len(report.dropped) == 4
        assert all("207008" in reason for reason in report.dropped.values())
        (stand_in,) = report.stand_ins.items()
        assert stand_in == ("decode[4, 4, 4, sampling=greedy] in place of decode[1, 1, 1, sampling=greedy]", 5)
        assert not report.fallbacks


def test_a_second_start_comes_from_the_compile_cache(npu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu puts its functions in the place of torch's; the cache counts it by its version."""
    monkeypatch.setenv("CORE_CACHE", "1")
    params, found = SamplingParams(max_new_tokens=4, ignore_eos=True), []
    for state in ("miss", "hit"):
        with Engine(built(npu, "llama"), npu, config("full")) as engine:
            found.append(engine.generate(PROMPTS[:1], params)[0].token_ids)
            report = engine.report()
            assert (report.cache.state, report.num_traces == 0) == (state, state == "hit"), report.cache
    assert found[0] == found[1]
