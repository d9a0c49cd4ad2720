"""Norms, gates and codes on an NPU against the references of the canonical ops: numbers by T1, layouts as faked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from npu_kernel_cases import BY_NAME, Call, moved, npu, on_device, own_calls, reason, taken
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.ops.declaration import CanonicalOp
from core_npu.ops import norm, quantize
from tests.kernel_cases import CPU, DTYPES, check, check_codes, randn

pytestmark = pytest.mark.npu_sim
HALF = (torch.bfloat16, torch.float16)


def calls(op: CanonicalOp, dtype: torch.dtype) -> list[Call]:
    return taken(op, own_calls(op, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "gated_activation", "gated_activation_fused"])
def test_rows_agree_with_the_reference(name: str, dtype: torch.dtype) -> None:
    device, op = npu(), BY_NAME[name]
    check(op, on_device(op, device), calls(op, dtype), CPU)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["quantize", "add_rms_norm_quantize", "gated_activation_quantize"])
def test_codes_agree_with_the_reference(name: str, dtype: torch.dtype) -> None:
    device, op = npu(), BY_NAME[name]
    check_codes(op, calls(op, dtype), on_device(op, device), CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_points_that_are_given_agree_with_the_reference(dtype: torch.dtype) -> None:
    device, op = npu(), BY_NAME["quantize_asymmetric"]
    for call in calls(op, dtype):
        codes, scale, zero = (each.cpu() for each in on_device(op, device)(**call))
        wanted = op.reference(**call)
        assert torch.equal(scale, wanted[1]) and torch.equal(zero, wanted[2])
        # x / scale is rounded before the zero point is added, or after: the same but where it is half an odd number.
        assert (codes.int() - wanted[0].int()).abs().max() <= 1
        assert (codes != wanted[0]).float().mean() < 0.01


def test_one_scale_is_taken_by_rows_of_float32_too() -> None:
    device, op = npu(), BY_NAME["quantize"]
    call = {"x": randn(7, 48, scale=3.0), "scale": torch.tensor(0.02), "dtype": torch.int8, "granularity": "tensor"}
    assert reason(op, call) is None
    check_codes(op, [call], on_device(op, device), CPU)


@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_scales_are_returned_in_memory_of_their_own(granularity: str) -> None:
    device = npu()
    x, scale = randn(3, 64, dtype=torch.bfloat16).to(device), torch.tensor(0.02, device=device)
    given = scale if granularity == "tensor" else None
    _, used = quantize.quantize(x, given, dtype=torch.int8, granularity=granularity)
    assert used.data_ptr() != scale.data_ptr() and used.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_codes_of_transposed_rows_lie_as_a_trace_has_them(dtype: torch.dtype) -> None:
    """The kernel gives contiguous codes for whatever strides, its fake the strides of x."""
    x, mode = randn(64, 9, dtype=dtype).to(npu()).t(), FakeTensorMode()
    codes, _ = quantize.quantize(x, None, dtype=torch.int8)
    with mode:
        traced, _ = quantize.quantize(mode.from_tensor(x), None, dtype=torch.int8)
    assert codes.is_contiguous() and traced.stride() == codes.stride()
    straight, _ = quantize.quantize(x.contiguous(), None, dtype=torch.int8)
    assert torch.equal(codes.cpu(), straight.cpu())


def test_rows_of_zeros_have_the_smallest_scale_and_codes_of_zero() -> None:
    device = npu()
    x, weight = torch.zeros(2, 64, dtype=torch.float16, device=device), torch.ones(64, device=device).half()
    tiny = torch.finfo(torch.float32).tiny
    for codes, scale, *_ in (
        quantize.quantize(x, None, dtype=torch.int8),
        norm.add_rms_norm_quantize(x, x, weight, 1e-6, None, dtype=torch.int8),
    ):
        assert torch.equal(codes.cpu(), torch.zeros(2, 64, dtype=torch.int8))
        assert torch.equal(scale.cpu(), torch.full((2, 1), tiny))


def test_gemma_adds_one_to_the_weight_in_its_kernel() -> None:
    from simulator import runtime

    device = npu()
    call: Any = {"x": randn(4, 64, dtype=torch.bfloat16), "weight": randn(64, dtype=torch.bfloat16), "eps": 1e-6}
    if not runtime.is_simulated():
        pytest.skip("reads the launches of the simulated runtime")
    launched = []
    for offset in (0.0, 1.0):
        on_the_device = moved(call, device)
        runtime.clear()
        norm.rms_norm(**on_the_device, offset=offset)
        launched.append(runtime.kernels("launch"))
    assert launched == [["aclnnRmsNorm"], ["aclnnGemmaRmsNorm"]]


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scales_of_float32_divide_rows_of_half_precision(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 64, generator=torch.Generator().manual_seed(6)) * 3).to(dtype)
    scales = torch.linspace(0.02, 0.06, 64)
    zero_points = torch.arange(64, dtype=torch.int32) % 7
    placed = (each.to("npu") for each in (x, scales, zero_points))
    found = torch.ops.npu.npu_quantize(*placed, torch.qint8, -1, True)
    assert torch.equal(found.cpu(), (x.float() / scales + zero_points).round().clamp(-128, 127).to(torch.int8))


@pytest.mark.parametrize(
    ("rows", "scales", "zero_points", "divides"),
    [
        (torch.float16, torch.float32, None, False),  # what multiplies wants scales as the rows are
        (torch.bfloat16, torch.float32, None, False),
        (torch.float16, torch.float16, torch.int32, False),  # and zero points as the scales are
        (torch.float16, torch.bfloat16, None, True),  # of bf16 all are, or none
        (torch.float32, torch.bfloat16, None, True),
        (torch.bfloat16, torch.bfloat16, torch.int32, True),
        (torch.float16, torch.float32, torch.float32, True),
    ],
    ids=str,
)
def test_other_scales_are_refused_as_cann_refuses_them(
    rows: torch.dtype, scales: torch.dtype, zero_points: torch.dtype | None, divides: bool
) -> None:
    x, scale = torch.ones(4, 64, dtype=rows).to("npu"), torch.ones(64, dtype=scales).to("npu")
    zeros = None if zero_points is None else torch.ones(64, dtype=zero_points).to("npu")
    with pytest.raises(RuntimeError, match=r"scales|zero points"):
        torch.ops.npu.npu_quantize(x, scale, zeros, torch.qint8, -1, divides)
