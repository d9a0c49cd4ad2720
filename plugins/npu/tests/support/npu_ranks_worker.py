"""One rank of an engine whose tiny model is cut among the NPUs, compared with the whole model on this NPU alone."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from core.compilation.options import CompileOptions
from core.device import Device
from core.engine.check.comparison import compare
from core.engine.models.loading import build_model
from core.engine.models.sharding import shard_model
from core.engine.models.tiny import tiny_config
from core.engine.parallel.rank import open_device
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from simulator import runtime

# Wide enough for the kernels that multiply and exchange: halves of 256 features.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64, "num_hidden_layers": 2}
OWN = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 4},
    "qwen3_moe": {"num_key_value_heads": 2, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_key_value_heads": 2},
}
PROMPTS = [[3, 4, 5, 6, 7, 90, 91, 92, 93, 94], [9, 10, 11]]
NUM_TOKENS = 8
FUSIONS = ("fuse_npu_linear_all_reduce", "fuse_all_reduce_norm", "async_tensor_parallel", "sequence_parallel")
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {"disable_passes": FUSIONS},
    "on": {},
    "split": {"enable_passes": ("sequence_parallel",)},
}
EXCHANGES = ("Hccl", "aclnnMatmulAllReduce", "aclnnMatmulReduceScatter", "aclnnAllGatherMatmul", "aclnnAddRmsNorm")


def run(device: Device, family: str, variant: str) -> dict[str, Any]:
    """Compile in full graphs, generate on all ranks in step, and compare by the criterion T1."""

    def built() -> Any:
        torch.manual_seed(0)
        config = tiny_config(family, **SIZES, **OWN[family])
        return build_model(config, torch_device=device.torch_device, dtype=torch.bfloat16)

    loaded, whole = built(), built().model
    shard_model(loaded.model)
    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=64,
        decode_buckets=(2,),
        prefill_buckets=(512,),
        sampling=("greedy",),
        options=CompileOptions(mode="full", strict=True, **VARIANTS[variant]),
    )
    runtime.clear()
    with Engine(loaded, device, config) as engine:
        captured = [name for name in runtime.kernels("capture") if name.startswith(EXCHANGES)]
        found = compare(engine, PROMPTS, num_tokens=NUM_TOKENS, rounds=1, whole=whole)
        report = engine.report()
        kinds = {event.kind for event in runtime.log()}
    assert found.verdict is not None, found
    return {
        "passed": found.passed,
        "reason": found.verdict.reason,
        "tokens_equal": found.tokens_equal,
        "mismatch": found.mismatch,
        "allowed": found.mismatch_allowed,
        "modes": report.modes,
        "left": [*report.fallbacks, *report.dropped, *report.stand_ins],
        "bad": sorted(kinds & {"deadlock", "invalid", "not_computed", "unsupported", "error"}),
        "captured": {name: captured.count(name) for name in dict.fromkeys(captured)},
    }


if __name__ == "__main__":
    opened, _ = open_device("npu", timeout_s=100)
    results = {variant: run(opened, sys.argv[1], variant) for variant in VARIANTS}
    sys.stdout.write(f"{json.dumps(results)}\n")
    sys.stdout.flush()
    torch.distributed.destroy_process_group()
