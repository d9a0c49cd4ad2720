"""An engine of `deterministic="batch"`: bitwise the same logits in any batch, by any chunks; else it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import LoweringError, ModelError, UsageError
from core.host.selection import select_device
from tests.engine.lora.folders import ATTENTION, MLP, make_layers, save_adapter
from tests.support import cpu, refused

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
LENGTHS = (1, 40, 7, 61, 16, 33, 2, 50)


def engine_of(model_type: str, dtype: torch.dtype = torch.float32, *, device: Any = "cpu", **fields: Any) -> Engine:
    device = select_device(device) if isinstance(device, str) else device
    loaded = build_model(tiny_config(model_type), torch_device=device.torch_device, dtype=dtype)
    given = {"max_num_seqs": 8, "max_model_len": 96, "deterministic": "batch", "sampling": ("greedy",)} | fields
    return Engine(loaded, device, EngineConfig(**given))


def prompts() -> list[list[int]]:
    return [[3 + (7 * index + 11 * place * place) % 150 for place in range(n)] for index, n in enumerate(LENGTHS)]


def logits(engine: Engine, asked: Sequence[list[int]], params: SamplingParams = PARAMS) -> list[Tensor]:
    return [each.logits for each in engine.generate(asked, params, collect_logits=True) if each.logits is not None]


def check(model_type: str, dtype: torch.dtype = torch.float32, **fields: Any) -> None:
    with engine_of(model_type, dtype, prefix_caching=False, **fields) as engine:
        alone = [logits(engine, [prompt])[0] for prompt in prompts()]
        for found, wanted in zip(logits(engine, prompts()), alone, strict=True):
            assert torch.equal(found, wanted)
    # Prompts in chunks of what 16 tokens of a step leave, beside the sequences that generate.
    with engine_of(model_type, dtype, max_step_tokens=16, prefill_buckets=(16,), **fields) as engine:
        assert all(map(torch.equal, logits(engine, prompts()), alone))
        assert engine.stats().chunked > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "starcoder2", "gemma2"])
def test_logits_are_the_same_bits_in_any_batch_and_by_any_chunks(model_type: str, dtype: torch.dtype) -> None:
    check(model_type, dtype)


def test_logits_of_a_llama_are_the_same_bits_alone_and_in_a_batch() -> None:
    with engine_of("llama", max_num_seqs=3, prefill_buckets=(96,), prefix_caching=False) as engine:
        asked = prompts()[:3]
        alone = [logits(engine, [prompt])[0] for prompt in asked]
        assert all(map(torch.equal, logits(engine, asked), alone))


@pytest.mark.slow
def test_shared_prefixes_and_preemption_change_no_bit() -> None:
    params = replace(PARAMS, max_new_tokens=24)
    with engine_of("llama", prefix_caching=False) as engine:
        alone = [logits(engine, [prompt], params)[0] for prompt in prompts()]
    # Room for little more than the longest sequence, so that others give theirs back and are computed again.
    tight = {"block_size": 8, "cache_tokens": 112, "max_step_tokens": 16, "prefill_buckets": (16,)}
    for caching in (False, True):
        with engine_of("llama", prefix_caching=caching, **tight) as engine:
            assert all(map(torch.equal, logits(engine, prompts(), params), alone))
            assert engine.stats().preempted > 0
    with engine_of("llama", block_size=8, prefill_buckets=(16,)) as engine:
        for _ in range(2):
            known = engine.stats().reused
            assert all(map(torch.equal, logits(engine, prompts(), params), alone))
        assert engine.stats().reused >= known + sum((n - 1) // 8 * 8 for n in LENGTHS)


@pytest.mark.slow
def test_adapters_of_others_change_no_bit(tmp_path: Path) -> None:
    who = ["one", None, "two", None, "two", "one", None, "one"]
    with engine_of("llama", prefix_caching=False, max_loras=2, max_lora_rank=4) as engine:
        for seed, name in enumerate(("one", "two")):
            layers = make_layers(engine.loaded.model, ATTENTION + MLP, rank=4, seed=seed)
            engine.load_lora(name, save_adapter(tmp_path / name, layers, rank=4, alpha=8))
        found = engine.generate(prompts(), PARAMS, collect_logits=True, lora=who)
        for prompt, name, each in zip(prompts(), who, found, strict=True):
            (alone,) = engine.generate([prompt], PARAMS, collect_logits=True, lora=name)
            assert each.logits is not None and alone.logits is not None
            assert torch.equal(each.logits, alone.logits)


@pytest.mark.slow
def test_sampled_tokens_are_the_same_by_the_same_seeds() -> None:
    def sampled(engine: Engine, asked: Sequence[list[int]]) -> list[Sequence[int]]:
        params = replace(PARAMS, temperature=1.3, top_p=0.9, seed=5)
        return [each.token_ids for each in engine.generate(asked, params)]

    with engine_of("llama", sampling=("greedy", "random")) as engine:
        assert sampled(engine, prompts()) == [sampled(engine, [prompt])[0] for prompt in prompts()]


@pytest.mark.slow
def test_drafts_change_no_bit() -> None:
    with engine_of("llama", speculative=3) as engine, torch.no_grad():
        drafted = [each.token_ids for each in engine.generate(prompts(), PARAMS)]
    with engine_of("llama") as engine:
        assert [each.token_ids for each in engine.generate(prompts(), PARAMS)] == drafted


@pytest.mark.slow
def test_a_model_with_products_that_nobody_declares_is_refused() -> None:
    with refused(LoweringError, 'deterministic="batch"'):
        engine_of("mixtral", max_num_seqs=2)


@pytest.mark.slow
@torch.no_grad()
def test_layers_that_are_no_linears_are_alike_too() -> None:
    with engine_of("gpt2", max_num_seqs=2) as engine:
        together = engine.generate(prompts(), PARAMS, collect_logits=True)
        for prompt, each in zip(prompts(), together, strict=True):
            (alone,) = engine.generate([prompt], PARAMS, collect_logits=True)
            assert each.logits is not None and alone.logits is not None
            assert torch.equal(each.logits, alone.logits)


def test_a_model_without_the_paged_cache_is_refused() -> None:
    with refused(UsageError, "deterministic='batch'", "can't run on the paged cache, which alone is batch-invariant"):
        engine_of("codegen", max_num_seqs=2)


@pytest.mark.cases(3)
@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2", "falcon_h1", "lfm2"])
def test_a_model_with_recurrent_states_is_refused(model_type: str) -> None:
    with refused(UsageError, "deterministic='batch'", "keeps recurrent states, and no implementation"):
        engine_of(model_type, max_num_seqs=2)


@pytest.mark.slow
def test_a_wrong_declaration_is_found_when_the_engine_is_made() -> None:
    def lying(each: Any) -> Any:
        wrong = {"cpu_linear_alike": "torch_linear"}.get(each.name)
        fn = next((other.fn for other in own if other.name == wrong), each.fn)
        return replace(each, fn=by_rows if wrong else fn)

    def by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Sum in halves where there are few rows."""
        if x.shape[-2] > 4:
            return torch.nn.functional.linear(x, weight, bias)
        half = x.shape[-1] // 3
        found = x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T
        return found if bias is None else found + bias

    own = select_device("cpu").ops
    with refused(ModelError, "its logits depend on the batch", "run the conformance suite"):
        engine_of("llama", device=cpu(ops=tuple(map(lying, own))))


def test_what_contradicts_it_is_refused_before_a_model_is_there() -> None:
    with refused(UsageError, "the engine states that itself"):
        EngineConfig(options=CompileOptions(deterministic="batch"))
    with refused(UsageError, 'it is "batch", or None'):
        EngineConfig(deterministic="all")  # type: ignore[arg-type]
    with refused(UsageError, "lowering 'inductor' is not declared batch-invariant"):
        engine_of("llama", options=CompileOptions(lowering="inductor"), max_num_seqs=1)
