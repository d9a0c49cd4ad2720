"""Products of codes and mixtures of experts on an NPU against the references of the canonical ops."""

from __future__ import annotations

import pytest
import torch
from npu_kernel_cases import BY_NAME, npu, on_device, own_calls, sampled, taken

from core.common.numerics import judge
from tests.kernel_cases import CPU, DTYPES, check, faked, in_fp64, laid_out, randn

pytestmark = pytest.mark.npu_sim
HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_products_of_codes_agree_with_the_reference(dtype: torch.dtype) -> None:
    device, op = npu(), BY_NAME["quantized_linear"]
    check(op, on_device(op, device), taken(op, sampled(op, dtype)), CPU)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_biases_of_any_dtype_are_added_before_rounding(bias: torch.dtype | None, dtype: torch.dtype) -> None:
    device, op = npu(), BY_NAME["quantized_linear"]
    codes = [randn(*shape, scale=40.0, seed=seed).to(torch.int8) for seed, shape in enumerate(((7, 48), (24, 48)))]
    call = {
        "x_codes": codes[0],
        "x_scale": torch.tensor(0.02),
        "w_codes": codes[1],
        "w_scale": torch.tensor([[0.011]]),
        "bias": None if bias is None else randn(24, dtype=bias, scale=3.0, seed=4),
        "out_dtype": dtype,
    }
    check(op, on_device(op, device), taken(op, [call]), CPU)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_weights_of_codes_agree_with_the_reference(dtype: torch.dtype) -> None:
    device, op = npu(), BY_NAME["weight_only_linear"]
    check(op, on_device(op, device), taken(op, own_calls(op, dtype)), CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routes_agree_with_the_reference(dtype: torch.dtype) -> None:
    device, op = npu(), BY_NAME["moe_route"]
    for call in taken(op, own_calls(op, dtype)):
        results = [each.cpu() for each in on_device(op, device)(**call)]
        assert laid_out(results) == laid_out(faked(op, call))
        wanted, exact = op.reference(**call), in_fp64(op, call)
        assert torch.equal(results[1], wanted[1]), call
        if results[0].numel() >= 64:
            verdict = judge(results[0], wanted[0], exact[0])
            assert verdict.passed, (call, verdict)
        else:
            torch.testing.assert_close(results[0], wanted[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_agree_with_the_reference(dtype: torch.dtype) -> None:
    device, op = npu(), BY_NAME["grouped_mlp"]
    check(op, on_device(op, device), taken(op, own_calls(op, dtype)), CPU)


def test_rows_are_put_back_token_by_token() -> None:
    """With as many choices as tokens, rows numbered choice by choice would be found in other places of one size."""
    device, op = npu(), BY_NAME["grouped_mlp"]
    indices = randn(4, 6, dtype=torch.float64).argsort(-1)[:, :4]
    call = {
        "x": randn(4, 16, seed=1),
        "weights": randn(4, 4, seed=2).sigmoid(),
        "indices": indices,
        "gate_up": randn(6, 48, 16, scale=0.3, seed=3),
        "down": randn(6, 16, 24, scale=0.3, seed=4),
        "kind": "silu",
    }
    check(op, on_device(op, device), [call], CPU)


@pytest.mark.parametrize("other", [9, -1])
def test_an_expert_that_nobody_chose_may_overflow(other: int) -> None:
    """A choice of no expert here is given to one of them, and nothing of its result may be seen."""
    device, op = npu(), BY_NAME["grouped_mlp"]
    gate_up = randn(4, 128, 32, scale=0.2, seed=4)
    gate_up[[0, 3]] *= 3000
    call = {
        "x": randn(5, 32, dtype=torch.float16),
        "weights": randn(5, 2, dtype=torch.float16, seed=3).abs(),
        "indices": torch.tensor([[1, other], [other, 2], [2, 1], [other, other], [1, other]]),
        "gate_up": gate_up.half(),
        "down": randn(4, 32, 64, dtype=torch.float16, seed=5),
        "kind": "silu",
    }
    assert op.reference(**call).isfinite().all()
    check(op, on_device(op, device), [call], CPU)
