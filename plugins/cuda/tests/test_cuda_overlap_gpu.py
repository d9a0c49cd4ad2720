"""Kernels that start under the one before them, on an NVIDIA GPU: whole models have the bits of one kernel at a time.

`tools/cuda/check_overlap.py` holds compiled kernels to the rule; this looks for what a rule could have missed. Models
as small as these have kernels of a few microseconds, all of which overlap.
"""

from __future__ import annotations

import pytest
import torch

import core

pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("triton", reason="needs triton")

from core.engine.config import SamplingParams
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig
from core.quantization.quantize import quantize
from core_cuda.ops import launching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]
STEPS = 120
PROMPTS = [[3 + (7 * place + index) % 50 for place in range(1 + 11 * index)] for index in range(12)]
"""Of 1 to 122 tokens: steps hold sequences of very different lengths, and some join while others decode."""
CONFIG = EngineConfig(
    max_num_seqs=8,
    max_model_len=256,
    prefill_buckets=(64,),
    prefix_caching=False,
    options=core.CompileOptions(strict=True),
)


def completions(model: str, scheme: str, rounds: int) -> list[list[Completion]]:
    device = core.select_device("cuda")
    torch.manual_seed(0)
    loaded = build_model(tiny_config(model), torch_device=device.torch_device, dtype=torch.bfloat16)
    if scheme:
        quantize(loaded.model, scheme)
    params = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
    with Engine(loaded, device, CONFIG) as engine:
        made = [engine.generate(PROMPTS, params, collect_logits=True) for _ in range(rounds)]
        assert set(engine.report().modes.values()) == {"full"}
    return made


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        *((name, "") for name in ("llama", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3")),
        *((name, "") for name in ("nemotron_h", "qwen3_next", "granitemoehybrid")),
        *(("llama", scheme) for scheme in ("fp8", "w8a16")),
    ],
)
def test_overlapping_kernels_have_the_bits_of_one_kernel_at_a_time(
    model: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three rounds on the same memory; what was chosen by timing stays chosen in this process."""
    overlapped = completions(model, scheme, rounds=3)
    asked = 0

    def never() -> bool:
        nonlocal asked
        asked += 1
        return False

    monkeypatch.setattr(launching, "may_overlap", never)
    (alone,) = completions(model, scheme, rounds=1)
    assert asked > 20
    for number, made in enumerate(overlapped):
        for index, (one, other) in enumerate(zip(made, alone, strict=True)):
            assert one.logits is not None and other.logits is not None
            same = (one.logits == other.logits).flatten(1).all(1)
            assert bool(same.all()), (number, index, "first differs at token", int(same.int().argmin()))
