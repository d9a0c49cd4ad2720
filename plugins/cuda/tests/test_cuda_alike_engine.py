"""Engines of `deterministic="batch"` on the plugin's kernels: the same logits in any batch and by any chunks.

In Triton's interpreter the recording device stands in for the GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("triton", reason="needs triton")

from core.compilation.options import CompileOptions
from core.device import Device
from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import LoweringError, UsageError
from core.host.selection import select_device
from tests.recording import acme
from tests.support import refused

pytestmark = pytest.mark.usefixtures("alike_products")

PROMPTS = ([3, 4, 5, 6, 7], [20 + (7 * place * place) % 100 for place in range(23)])
PARAMS = SamplingParams(max_new_tokens=2, ignore_eos=True)


def device_of(kernel_device: torch.device) -> Device:
    if kernel_device.type == "cuda":
        return select_device("cuda")
    from core_cuda.implementations import IMPLEMENTATIONS
    from core_cuda.lowerings import LOWERINGS
    from core_cuda.passes.registry import PASSES

    return acme(ops=IMPLEMENTATIONS, passes=PASSES, lowerings=LOWERINGS)


def engine_of(name: str, device: Device, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Engine:
    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=32,
        decode_buckets=(2,),
        prefill_buckets=(16,),
        max_step_tokens=16,
        sampling=("greedy",),
        prefix_caching=False,
        deterministic="batch",
        options=CompileOptions(mode="full", strict=True),
    )
    loaded = build_model(tiny_config(name), torch_device=device.torch_device, dtype=dtype)
    return Engine(loaded, device, replace(config, **fields))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # transformers'
def test_logits_do_not_depend_on_the_batch(name: str, kernel_device: torch.device) -> None:
    with engine_of(name, device_of(kernel_device)) as engine:  # which compares a prompt alone with one in a batch
        for trace in engine.report().traces:
            chosen = {choice.op: choice.implementation for choice in trace.ops if choice.implementation != "original"}
            assert set(chosen.values()) <= {each.name for each in device_of(kernel_device).ops if each.batch_invariant}
            assert chosen["core::linear"] == "cuda_linear_alike"
            assert ("core::grouped_mlp" in chosen) == (name == "qwen3_moe")
        # Alone, the prompt comes in chunks of 16 and 7; behind another, of 11 and 12.
        (alone,) = engine.generate([PROMPTS[1]], PARAMS, collect_logits=True)
        *_, last = engine.generate(PROMPTS, PARAMS, collect_logits=True)
    assert alone.logits is not None and last.logits is not None
    assert torch.equal(last.logits, alone.logits)


def test_models_whose_products_nobody_declares_are_refused(kernel_device: torch.device) -> None:
    with refused(LoweringError, "addmm: node", "a product whose order of sums depends on its sizes"):
        engine_of("gpt2", device_of(kernel_device))


def test_a_wider_lowering_is_refused(kernel_device: torch.device) -> None:
    options = CompileOptions(mode="full", lowering="inductor")
    with refused(UsageError, "lowering 'inductor' is not declared batch-invariant", "inline"):
        engine_of("llama", device_of(kernel_device), options=options)


def test_a_quantised_cache_is_refused(kernel_device: torch.device) -> None:
    with refused(LoweringError, "core::attention: no batch-invariant implementation takes", "float8_e4m3fn"):
        engine_of("llama", device_of(kernel_device), kv_cache_dtype="fp8")
