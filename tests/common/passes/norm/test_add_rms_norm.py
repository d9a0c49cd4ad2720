"""core/common/passes/norm/add_rms_norm.py: a residual add and the norm of its sum are one op, and the sum stays."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core.common.passes.norm.add_rms_norm import FUSE_ADD_RMS_NORM
from core.common.passes.norm.rms_norm import LIFT_RMS_NORM
from tests.common.passes.lifting import BF16, DTYPES, F32, Lifted, draw, lifted, lifted_graph, traced_model
from tests.marks import slow_except

D = 24
# Residual adds in front of a norm: pre-norm layers have two, less the first; OLMo 2 normalises before it adds.
MODELS = {"llama": 4, "qwen3": 4, "gemma3_text": 4, "olmo2": 1, "phi3": 4}


def fuse(function: Callable[..., Any], **inputs: Tensor) -> Lifted:
    return lifted(function, LIFT_RMS_NORM, FUSE_ADD_RMS_NORM, **inputs)


def pair(dtype: torch.dtype = F32, num_tokens: int = 5) -> dict[str, Tensor]:
    return {"x": draw(2, num_tokens, D, dtype=dtype), "y": draw(2, num_tokens, D, dtype=dtype, seed=9)}


def norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.to(F32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), slow_except(product(MODELS, DTYPES), ("phi3", F32), ("olmo2", BF16)), ids=str
)
def test_a_model_is_fused_whole_and_no_bit_changes(name: str, dtype: torch.dtype) -> None:
    graph, inputs, num_norms = traced_model(name, dtype)
    result = lifted_graph(graph, inputs, LIFT_RMS_NORM, FUSE_ADD_RMS_NORM)
    assert result.reports["lift_rms_norm"].matched == num_norms
    assert result.count(RMS_NORM.overload) == num_norms - MODELS[name]
    assert result.count(ADD_RMS_NORM.overload) == result.reports["fuse_add_rms_norm"].matched == MODELS[name]
    assert result.is_equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 17])
def test_a_residual_used_twice_stays_available(dtype: torch.dtype, num_tokens: int) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        return norm(total, 1e-6) * 1.5 + total * 2 + total.sum()

    result = fuse(model, **pair(dtype, num_tokens))
    assert result.count(ADD_RMS_NORM.overload) == 1
    assert result.is_equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["the norm's own", "used elsewhere"])
def test_a_sum_that_is_widened_first_is_fused(dtype: torch.dtype, shared: bool) -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        wide = (x + y).to(F32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (normed, wide * 2) if shared else (normed,)

    result = fuse(model, **pair(dtype))
    assert result.count(ADD_RMS_NORM.overload) == 1
    assert result.is_equal


def test_a_single_norm_of_a_widened_sum_computes_in_the_wide_dtype() -> None:
    result = fuse(lambda x, y: torch.rms_norm((x + y).double(), (D,), eps=1e-5), **pair())
    (call,) = result.calls(ADD_RMS_NORM.overload)
    assert call.kwargs["compute_dtype"] == torch.float64
    assert result.is_equal


def test_a_wide_residual_is_added_in_its_dtype() -> None:
    result = fuse(lambda x, y: norm(x + y), x=draw(5, D, dtype=BF16), y=draw(5, D, seed=9))
    assert result.count(ADD_RMS_NORM.overload) == 1
    assert result.is_equal


def test_a_sum_with_two_norms_is_fused_with_the_first() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return norm(total, 1e-5), norm(total, 1e-6)

    result = fuse(model, **pair())
    assert (result.count(ADD_RMS_NORM.overload), result.count(RMS_NORM.overload)) == (1, 1)
    assert "by an earlier norm" in result.reasons("fuse_add_rms_norm")
    assert result.is_equal


NEAR_MISSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "other shapes": (lambda x, y: norm(x + y[:, :1]), "different shapes"),
    "a scaled operand": (lambda x, y: norm(torch.add(x, y, alpha=2)), "scales one of its operands"),
    "in place": (lambda x, y: norm((x * 2).add_(y)), "adds in place"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_left_alone_with_the_reason(case: str) -> None:
    function, reason = NEAR_MISSES[case]
    result = fuse(function, **pair())
    assert result.reports["lift_rms_norm"].matched == 1
    assert result.count(ADD_RMS_NORM.overload) == 0
    assert reason in result.reasons("fuse_add_rms_norm")
    assert result.is_equal


@pytest.mark.parametrize(
    "function", [lambda x, y: norm(x + 1.0), lambda x, y: norm(x * 3) + y], ids=["number", "scale"]
)
def test_what_is_no_residual_add_makes_no_noise(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    report = fuse(function, **pair()).reports["fuse_add_rms_norm"]
    assert (report.matched, report.near_misses) == (0, ())


def test_a_narrowed_sum_is_normalised_as_it_is() -> None:
    result = fuse(lambda x, y: norm((x + y).to(BF16)), **pair())
    assert (result.count(ADD_RMS_NORM.overload), result.count(RMS_NORM.overload)) == (0, 1)
    assert result.is_equal


def test_an_operand_written_after_the_add_is_a_near_miss() -> None:
    buffer = draw(2, 5, D)

    def model(x: Tensor, y: Tensor) -> Tensor:
        total = buffer + y
        buffer.add_(x)
        return norm(total)

    result = fuse(model, **pair())
    assert result.count(ADD_RMS_NORM.overload) == 0
    assert "written" in result.reasons("fuse_add_rms_norm")
