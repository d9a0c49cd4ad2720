"""Products with a collective: which calls the kernels take, and the pass that fuses products with sums of processes.

A pretended group computes nothing; tests/simulated/test_ranks.py has the numbers of two processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from npu_kernel_cases import BY_NAME, Call, reason
from npu_rewriting import HALVES, cast, draw, rewritten
from torch import Tensor, fx
from torch.nn import functional

from core.common.ops.canonical import ALL_REDUCE, RMS_NORM
from core.common.passes.collective.norm import FUSE_ALL_REDUCE_NORM
from core.common.passes.declaration import Pass
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewriting import Rewriter
from core.compilation.trace.tracing import trace
from core.errors import PassError
from core.verify.planted import Mistake, with_mistake
from core_npu.ops.collective import linear_all_reduce
from core_npu.passes.linear.all_reduce import FUSE_LINEAR_ALL_REDUCE
from tests.common.processes import pretended
from tests.support import cpu

SMALL = replace(FUSE_LINEAR_ALL_REDUCE, params=MappingProxyType({"least_tokens": 4}))
K, N = 256, 64


@pytest.fixture
def group() -> Iterator[str]:
    with pretended(2) as name:
        yield name


def projected(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
    """Sum a row-parallel layer over the processes, add, and norm, as a decoder layer does."""
    total = ALL_REDUCE.overload(functional.linear(x, weight, bias), "") + residual
    return RMS_NORM.overload(total, gamma, 1e-6)


def drawn(tokens: int = 8) -> dict[str, Tensor]:
    shapes = {"x": (tokens, K), "weight": (N, K), "bias": (N,), "residual": (tokens, N), "gamma": (N,)}
    return {name: draw(*shape, seed=len(name), scale=0.1) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_product_and_its_sum_become_one_call(group: str, dtype: torch.dtype) -> None:
    found = rewritten(projected, SMALL, **cast(drawn(), dtype))
    assert found.matched == 1 and found.calls == ["core_npu::linear_all_reduce"]
    assert not any(node.target is ALL_REDUCE.overload for node in found.module.graph.nodes)
    found.check()


def test_the_norm_is_left_without_the_sum(group: str) -> None:
    found = rewritten(projected, FUSE_ALL_REDUCE_NORM, SMALL, **cast(drawn(), torch.bfloat16))
    matched = {name: report.matched for name, report in found.reports.items()}
    assert matched == {SMALL.name: 1, FUSE_ALL_REDUCE_NORM.name: 0}


def without_bias(node: fx.Node) -> bool:
    """Drop the bias of a fused call."""
    if node.target is not linear_all_reduce:
        return False
    node.args = (*node.args[:2], None, *node.args[3:])
    return True


def verified(declared: Pass) -> int:
    """Return the matches on the layer in bf16, each judged in fp64."""
    inputs = cast(drawn(), torch.bfloat16)
    graph = trace(projected, inputs)
    rewriter = Rewriter(cpu(passes=(declared,)), PassSwitches(only=(declared.name,)), strict=True, verify="full")
    made = rewriter.rewrite(graph, examples=[graph.values(inputs)])
    return sum(report.matched for report in made.passes if report.name == declared.name)


def test_a_site_is_judged_and_a_planted_mistake_is_found(group: str) -> None:
    assert verified(SMALL) == 1
    wrong = Mistake(name="bias", of=SMALL.name, what="no bias", make=without_bias)
    with pytest.raises(PassError, match="error over bound"):
        verified(replace(with_mistake(SMALL, wrong), name=SMALL.name))


def unprojected(x: Tensor) -> Tensor:
    return ALL_REDUCE.overload(x * 2, "")  # type: ignore[no-any-return]


def read_twice(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    own = functional.linear(x, weight)
    return ALL_REDUCE.overload(own, ""), own + 1


@pytest.mark.parametrize(
    ("function", "inputs", "words"),
    [
        (projected, drawn(), "is torch.float32, the kernel takes torch.bfloat16 and torch.float16"),
        (projected, cast(drawn(3), torch.float16), "has 3 tokens, the pass is for 4 at least"),
        (unprojected, {"x": draw(8, K).half()}, "is no linear layer's"),
        (read_twice, {"x": draw(8, K).half(), "weight": draw(N, K).half()}, "is read by others too"),
    ],
    ids=["fp32", "few tokens", "no product", "read twice"],
)
def test_near_misses_say_why(group: str, function: Any, inputs: dict[str, Tensor], words: str) -> None:
    found = rewritten(function, SMALL, **inputs)
    assert found.matched == 0 and words in found.reasons


def test_decode_keeps_its_sums(group: str) -> None:
    found = rewritten(projected, FUSE_LINEAR_ALL_REDUCE, **cast(drawn(511), torch.bfloat16))
    assert found.matched == 0 and "has 511 tokens, the pass is for 512 at least" in found.reasons


def test_the_kernels_exchange_among_some_numbers_of_npus() -> None:
    with pretended(3):
        found = rewritten(projected, SMALL, **cast(drawn(), torch.bfloat16))
    assert found.matched == 0 and "the group has 3 processes, and the kernels take 2, 4, 8" in found.reasons


# Conditions of the canonical ops.

ROWS: Call = {
    "x": torch.zeros(8, K, dtype=torch.bfloat16),
    "weight": torch.zeros(N, K, dtype=torch.bfloat16),
    "bias": None,
    "group": "",
    "dim": 0,
}


@pytest.mark.parametrize("name", ["linear_reduce_scatter", "all_gather_linear"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"bias": torch.zeros(N, dtype=torch.bfloat16)}, "the kernels add none"),
        ({"x": torch.zeros(8, 128, dtype=torch.bfloat16)}, "rows of 128, and the kernels take 256 to 65534"),
        ({"x": torch.zeros(8, K)}, "x is torch.float32"),
        ({"weight": torch.zeros(N, K, dtype=torch.float16)}, "one dtype"),
    ],
    ids=["taken", "bias", "narrow", "fp32", "two dtypes"],
)
def test_conditions_say_why(group: str, name: str, change: Call, words: str | None) -> None:
    found = reason(BY_NAME[name], {**ROWS, **change})
    assert found is None if words is None else words in (found or "")


def test_one_process_has_nobody_to_exchange_with() -> None:
    assert "the group has 1 processes" in (reason(BY_NAME["all_gather_linear"], ROWS) or "")
