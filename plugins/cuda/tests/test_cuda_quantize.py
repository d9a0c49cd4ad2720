"""core_cuda/ops/quantize.py against `core::quantize`, and the conditions that kernels over rows share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.common.ops.implementation import OpCall
from core.common.ops.quantize.symmetric import QUANTIZE
from tests.kernel_cases import CPU, DTYPES, code_steps, faked, laid_out, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops import conditions, quantize

CODES = (torch.float8_e4m3fn, torch.int8)
NAMES = [sample.name for sample in QUANTIZE.samples(torch.float32, CPU)]
HALF = (torch.bfloat16, torch.float16)


def check(call: dict[str, Any], device: torch.device, share: float = 0.0) -> None:
    """Expect the reference's layout, scales to the last bit, and codes of which `share` may be one apart."""
    results, wanted = quantize.quantize(**moved(call, device)), QUANTIZE.reference(**call)
    assert laid_out(list(results)) == laid_out(faked(QUANTIZE, call))
    codes, scale = (t.cpu() for t in results)
    torch.testing.assert_close(scale, wanted[1], rtol=0, atol=0, equal_nan=True)
    if codes.numel():
        steps = code_steps(codes, wanted[0])
        assert steps.max() <= 1
        assert steps.float().mean() <= share


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_the_references_own(dtype: torch.dtype, kernel_device: torch.device) -> None:
    for sample in QUANTIZE.samples(dtype, CPU):
        check(dict(sample.kwargs), kernel_device)


@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("code", CODES, ids=str)
def test_rows_of_any_length(code: torch.dtype, granularity: str, kernel_device: torch.device) -> None:
    for size in ((5, 1), (4, 63), (2, 4096), (2, 40_000), (64,)):
        for dtype in DTYPES:
            call = {"x": randn(*size, dtype=dtype, scale=3.0), "scale": None, "dtype": code, "granularity": granularity}
            check(call, kernel_device)
            if granularity == "token":
                check({**call, "scale": randn(*size[:-1], 1, scale=0.001, shift=0.02)}, kernel_device)


def test_rows_that_are_slices_or_transposed(kernel_device: torch.device) -> None:
    for x in (
        randn(3, 5, 96)[..., 32:64],
        randn(2, 3, 4, 64).permute(2, 0, 1, 3),
        randn(64, 6).t(),
        randn(9, 128)[:, ::2],
    ):
        for options in ({}, {"granularity": "tensor"}, {"granularity": "group", "group_size": 16}):
            for scale in (None, QUANTIZE.reference(x.flip(0), None, dtype=torch.int8, **options)[1]):
                check({"x": x, "scale": scale, "dtype": torch.int8, **options}, kernel_device)


def test_a_scale_in_half_precision_is_widened(kernel_device: torch.device) -> None:
    scale = torch.tensor(0.03, dtype=torch.bfloat16)
    check({"x": randn(4, 64), "scale": scale, "dtype": torch.int8, "granularity": "tensor"}, kernel_device)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("granularity", ["token", "tensor"])
def test_rows_that_are_not_finite(granularity: str, kernel_device: torch.device) -> None:
    x = randn(4, 64)
    x[1, 3], x[2, 5] = float("nan"), float("-inf")
    call = {"x": x, "scale": None, "dtype": torch.float8_e4m3fn, "granularity": granularity}
    (codes, scale), wanted = quantize.quantize(**moved(call, kernel_device)), QUANTIZE.reference(**call)
    torch.testing.assert_close(scale.cpu(), wanted[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(codes.cpu().float(), wanted[0].float(), rtol=0, atol=0, equal_nan=True)


def test_every_configuration_gives_the_same(kernel_device: torch.device) -> None:
    x = randn(37, 96).to(kernel_device)
    wanted = QUANTIZE.reference(x, None, dtype=torch.int8)
    configs = list(quantize.candidates(37, 96))
    assert len(configs) > 5
    for config in configs[:: 1 if kernel_device.type == "cuda" else 3]:
        codes, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(37, 1)
        quantize.quantize_rows(x, None, codes, scale, config=config)
        assert torch.equal(codes, wanted[0])
        assert torch.equal(scale, wanted[1])


def call(**args: Any) -> OpCall:
    return OpCall(op="core::rms_norm", args=args)


def test_conditions_say_what_the_kernels_take() -> None:
    x, wide = randn(2, 4, dtype=torch.bfloat16), randn(2, 4, dtype=torch.float64)
    assert conditions.dtypes(call(x=x, weight=None, out_dtype=torch.float16, dtype=torch.int8)) is None
    assert conditions.dtypes(call(x=x, weight=wide)) == (
        "weight is torch.float64, and the kernel takes torch.float32, torch.bfloat16, torch.float16"
    )
    assert "out_dtype is torch.float64" in str(conditions.dtypes(call(x=x, out_dtype=torch.float64)))
    computes = conditions.computes_in_fp32("x")
    assert computes(call(x=x)) is None
    assert computes(call(x=x, compute_dtype=torch.bfloat16)) is None
    assert computes(call(x=x, compute_dtype=torch.float32)) is None
    assert "compute_dtype is torch.float16 and x torch.bfloat16" in str(
        computes(call(x=x, compute_dtype=torch.float16))
    )
    assert conditions.code_dtype(call(dtype=torch.int8)) is None
    assert "dtype is torch.float8_e5m2" in str(conditions.code_dtype(call(dtype=torch.float8_e5m2)))
    both = conditions.all_of(computes, conditions.dtypes)
    assert both(call(x=x)) is None
    assert "weight is" in str(both(call(x=x, weight=wide)))
