"""Passes on an NVIDIA GPU: models rewritten, verified and captured, and weights that stay where graphs read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import core
from core.compilation.capture.inputs import InputSpec
from core.device import Device

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.engine.check.comparison import compare
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]
PROMPTS = ([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22])


@pytest.fixture(scope="module")
def device() -> Device:
    return core.select_device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
def test_a_model_is_rewritten_verified_and_right(name: str, dtype: torch.dtype, device: Device) -> None:
    if name == "qwen3_moe" and dtype == torch.float32:
        pytest.skip("transformers runs fp32 experts with reads on the host, which no graph can capture")
    loaded = build_model(tiny_config(name), torch_device=device.torch_device, dtype=dtype)
    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=64,
        decode_buckets=(2,),
        prefill_buckets=(32,),
        options=core.CompileOptions(verify="full", strict=True),
    )
    with Engine(loaded, device, config) as engine:
        for trace in engine.report().traces:
            matched = {p.name: p.matched for p in trace.passes}
            assert matched["lift_rms_norm"] >= 5 and matched["lift_rotary"] == 2 and matched["merge_linears"] >= 2
            assert not any(p.error for p in trace.passes)
        result = compare(engine, PROMPTS, num_tokens=16, rounds=1)
    assert result.passed and result.verdict is not None and result.verdict.passed


class Projections(nn.Module):
    """Two projections of one input, which are worth merging."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum(-1) + self.second(x).sum(-1)


def test_a_captured_graph_reads_its_weights_after_another_compile(device: Device) -> None:
    module = Projections().eval().to(device.torch_device)
    x = torch.randn(8, 64, device=device.torch_device)
    options: dict[str, Any] = {"inputs": {"x": InputSpec((8, 64), torch.float32)}, "lowering": "inline"}
    expected = module(x).clone()
    with core.compile(module, device, **options, passes=()) as first:
        with core.compile(module, device, **options) as second:
            torch.testing.assert_close(second(x=x), expected)
        torch.cuda.empty_cache()
        clutter = [torch.full((64, 64), float("nan"), device=device.torch_device) for _ in range(64)]
        torch.testing.assert_close(first(x=x), expected)
        del clutter
