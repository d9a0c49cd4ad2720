"""Whole models on the plugin's kernels: every op they implement is lowered to them, and the tokens stay the model's.

In Triton's interpreter the recording device stands in for the GPU; what the graphs hold are the kernels all the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.device import Device
from core.engine.check import compare
from core.engine.engine import Engine
from core.engine.loading import build_model
from core.engine.runner import EngineConfig
from core.engine.tiny import tiny_config
from core.host import select_device
from tests.recording import acme

PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22])
CONFIG = EngineConfig(
    max_num_seqs=2,
    max_model_len=64,
    decode_buckets=(2,),
    prefill_buckets=(32,),
    lowering="inline",
    mode="full",
    sampling=("greedy",),
    strict=True,
)
EXPECTED: dict[str, dict[str, int]] = {
    "llama": {"core::rms_norm": 1, "core::add_rms_norm": 4, "core::rotary_attention": 2},
    "qwen3": {"core::rms_norm": 1, "core::add_rms_norm": 4, "core::rotary_attention": 2},
}
"""Calls of models of two layers, by model type."""


def device_of(kernel_device: torch.device) -> Device:
    if kernel_device.type == "cuda":
        return select_device("cuda")
    from core_cuda.implementations import IMPLEMENTATIONS

    return acme(ops=IMPLEMENTATIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_runs_on_the_kernels_alone(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    device = device_of(kernel_device)
    loaded = build_model(tiny_config(name), torch_device=device.torch_device, dtype=dtype)
    with Engine(loaded, device, CONFIG) as engine:
        for trace in engine.report().traces:
            chosen: Counter[Any] = Counter(choice.op for choice in trace.ops if choice.implementation[:5] == "cuda_")
            wanted = dict(EXPECTED[name])
            if dtype != torch.float32:
                wanted |= {"core::linear": 7, "core::gated_linear": 2} if name in ("llama", "qwen3") else {}
            else:
                wanted |= {"core::gated_activation_fused": 2}
            assert chosen == wanted, trace.phase
        result = compare(engine, PROMPTS, num_tokens=6, rounds=1)
    assert result.passed and result.verdict is not None and result.verdict.passed
