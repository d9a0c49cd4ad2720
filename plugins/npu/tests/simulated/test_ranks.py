"""Models cut among two NPUs, in full graphs, and torch_npu's products with a collective: by T1 against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.common.processes import launch

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gpt_oss")
# Of the graphs of a prefill of 512 tokens and a decode step, two layers each. The embedding is summed, and its logits'
# best are gathered.
SUMS = {"HcclAllReduce": 10, "aclnnAddRmsNorm": 8, "HcclAllGather": 2}
FUSED = {**SUMS, "HcclAllReduce": 6, "aclnnMatmulAllReduce": 4}
EXPERTS = {**SUMS, "HcclAllReduce": 8, "aclnnMatmulAllReduce": 2}  # what experts give is no linear layer's
SPLIT = {
    "HcclAllReduce": 2,
    "aclnnMatmulReduceScatterV2": 8,
    "aclnnAddRmsNorm": 8,
    "aclnnAllGatherMatmulV2": 6,
    "HcclAllGather": 4,
}
CAPTURED: dict[str, dict[str, dict[str, int]]] = {
    "llama": {"off": SUMS, "on": FUSED, "split": SPLIT},
    "qwen3": {"off": SUMS, "on": FUSED, "split": SPLIT},
    "qwen3_moe": {"off": SUMS, "on": EXPERTS, "split": EXPERTS},
    "gpt_oss": {"off": SUMS, "on": EXPERTS, "split": EXPERTS},
}


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_SIM_DEVICES", "2")
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "100")


@cache
def _models(family: str) -> list[Any]:
    return launch("npu_ranks_worker", family)


@pytest.mark.parametrize("variant", ["off", "on", "split"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_two_npus_gives_the_tokens_and_logits_of_one(family: str, variant: str) -> None:
    for rank in _models(family):
        each = rank[variant]
        assert each["passed"], each["reason"]
        assert each["tokens_equal"] or each["allowed"], each["mismatch"]
        assert each["modes"] == {"decode": "full", "prefill": "full"} and not each["left"] and not each["bad"]
        assert each["captured"] == CAPTURED[family][variant]


@cache
def _products() -> list[Any]:
    return launch("npu_products_worker")


KERNELS = {
    "all-reduce": (["aclnnAddmm", "HcclAllReduce"], ["aclnnMatmulAllReduce"]),
    "reduce-scatter": (["aclnnMatmul", "HcclReduceScatter"], ["aclnnMatmulReduceScatterV2"]),
    "all-gather 0": (["HcclAllGather", "aclnnMatmul"], ["aclnnAllGatherMatmulV2"]),
    "all-gather 1": (["HcclAllGather", "aclnnMatmul"], ["aclnnAllGatherMatmulV2"]),
}


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
@pytest.mark.parametrize("shape", ["rows", "batch"])
@pytest.mark.parametrize("op", KERNELS)
def test_a_product_with_a_collective_is_both(op: str, shape: str, dtype: str) -> None:
    for each in _products():
        found = each[dtype][f"{op}, {shape}"]
        assert found["reasons"] == [] and found["same"], "eagerly and replayed"
        assert (found["before"], found["after"]) == KERNELS[op]
