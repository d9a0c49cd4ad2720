"""core_cuda/ops/norm.py against the references of the canonical ops: numbers, layouts, rows of any length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from core.common.ops.normalization import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from core.common.ops.quantization import quantize as quantize_reference
from tests.kernel_cases import CODED, CPU, DTYPES, check, code_steps, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops import norm

OPS = (RMS_NORM, ADD_RMS_NORM, LAYER_NORM)
HALF = (torch.bfloat16, torch.float16)


def kernel_for(op: Any) -> Any:
    return getattr(norm, op.name)


def call_of(op: Any, x: torch.Tensor, **options: Any) -> dict[str, Any]:
    width = x.shape[-1]
    weight = randn(width, dtype=options.pop("weight", x.dtype), seed=7, scale=0.4, shift=1.0)
    call = {"x": x, "weight": weight, "eps": 1e-5, **options}
    if op is LAYER_NORM:
        call |= {"bias": randn(width, dtype=x.dtype, seed=8)}
    if op is ADD_RMS_NORM:
        call |= {"residual": randn(*x.shape, dtype=x.dtype, seed=9)}
    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_norms_agree_with_the_reference_on_its_samples(
    op: Any, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check(op, kernel_for(op), [s.kwargs for s in op.samples(dtype, CPU)], kernel_device)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_rows_of_any_length(op: Any, kernel_device: torch.device) -> None:
    sizes = [(9, 1), (5, 63), (2, 4096), (1, 16384), (40, 64)]
    calls = [call_of(op, randn(*size, dtype=dtype)) for size, dtype in product(sizes, DTYPES)]
    check(op, kernel_for(op), calls, kernel_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_rows_too_long_for_registers(op: Any, dtype: torch.dtype, kernel_device: torch.device) -> None:
    check(op, kernel_for(op), [call_of(op, randn(2, 40_000, dtype=dtype, shift=0.5))], kernel_device)


def forms(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield what models slice, split and transpose, and what no two strides lead to."""
    merged = randn(2, 5, 6 * 64, dtype=dtype)
    yield merged[..., : 4 * 64].unflatten(-1, (4, 64))
    yield merged[..., 4 * 64 : 5 * 64].unflatten(-1, (1, 64))
    yield randn(1, 5, 4, 64, dtype=dtype).transpose(1, 2)
    yield randn(3, 4, 5, 64, dtype=dtype).permute(2, 0, 1, 3)
    yield randn(64, 6, dtype=dtype).t()
    yield randn(6, 64, 3, dtype=dtype).transpose(1, 2)
    yield randn(4, 6, 8, 128, dtype=dtype)[::2, ::3, ::2, :64]
    yield randn(1, 64, dtype=dtype).expand(5, 64)
    yield randn(64, dtype=dtype)
    yield randn(3, 4, 128, dtype=dtype)[..., ::2]
    yield randn(2, 0, 64, dtype=dtype)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_results_lie_in_memory_as_the_references_do(op: Any, kernel_device: torch.device) -> None:
    calls = [call_of(op, x, **extra) for x in forms(torch.bfloat16) for extra in ({}, {"out_dtype": torch.float32})]
    check(op, kernel_for(op), calls, kernel_device)


def test_a_residual_may_lie_in_memory_in_another_way(kernel_device: torch.device) -> None:
    x = randn(2, 3, 5, 64).transpose(1, 2)
    residual = randn(2, 5, 3, 64, dtype=torch.bfloat16, seed=1)
    check(ADD_RMS_NORM, norm.add_rms_norm, [{**call_of(ADD_RMS_NORM, x), "residual": residual}], kernel_device)


ROUNDING = [
    {"normed_dtype": torch.bfloat16},
    {"normed_dtype": torch.bfloat16, "out_dtype": torch.float32},
    {"normed_dtype": torch.bfloat16, "weight": torch.float32, "out_dtype": torch.float32},
    {"normed_dtype": torch.bfloat16, "weight": torch.float16, "out_dtype": torch.float32},
    {"offset": 1.0},
    {"offset": 1.0, "weight_dtype": torch.float32},
    {"weight": torch.float32, "weight_dtype": torch.bfloat16, "offset": 0.25},
    {"compute_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", ROUNDING, ids=str)
def test_rounding_happens_where_the_arguments_say(options: dict[str, Any], kernel_device: torch.device) -> None:
    """Nearly every element is the reference's own: a rounding left out or added would move about half of them."""
    call = call_of(RMS_NORM, randn(16, 512, dtype=torch.bfloat16), **options)
    check(RMS_NORM, norm.rms_norm, [call], kernel_device)
    if "compute_dtype" not in options:
        result, wanted = norm.rms_norm(**moved(call, kernel_device)).cpu(), RMS_NORM.reference(**call)
        if wanted.dtype in HALF or {"weight"}.isdisjoint(options):
            assert ((result - wanted).abs() > 1e-5 * wanted.abs()).float().mean() < 0.01


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_rows_that_are_not_finite_leave_the_others_alone(op: Any, kernel_device: torch.device) -> None:
    x = randn(4, 80)
    x[1, 3], x[2, 5], x[3, 7] = float("nan"), float("-inf"), float("inf")
    call = call_of(op, x)
    result, wanted = kernel_for(op)(**moved(call, kernel_device)), op.reference(**call)
    first, expected = (result[0], wanted[0]) if isinstance(result, tuple) else (result, wanted)
    assert torch.equal(first.cpu().isnan(), expected.isnan())
    torch.testing.assert_close(first.cpu(), expected, equal_nan=True)


def test_every_configuration_gives_the_same(kernel_device: torch.device) -> None:
    x, out = (t.to(kernel_device) for t in (randn(37, 96), torch.empty(37, 96)))
    weight = randn(96, seed=7).to(kernel_device)
    wanted = RMS_NORM.reference(x, weight, 1e-5)
    options = norm.options_of(weight, 1e-5, 0.0, x.dtype, (None, None, None))
    configs = list(norm.candidates(37, 96))
    assert len(configs) > 5
    for config in configs[:: 1 if kernel_device.type == "cuda" else 3]:
        norm.run_norm(
            {"x": x, "residual": None}, {"out": out.zero_(), "total": None, "scale": None}, options, config=config
        )
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize(("dtype", "code"), CODED, ids=str)
@pytest.mark.parametrize("width", [63, 4096, 40_000])
def test_codes_are_those_of_the_normed_rows(
    width: int, dtype: torch.dtype, code: torch.dtype, kernel_device: torch.device
) -> None:
    x, residual, weight = randn(3, width, dtype=dtype), randn(3, width, dtype=dtype, seed=1), randn(width, seed=2)
    for given in (None, torch.tensor(0.02)):
        for added in (False, True):
            options = {"weight": weight.to(dtype), "eps": 1e-6, "normed_dtype": dtype}
            call = {"x": x, **({"residual": residual} if added else {}), **options}
            kernel = norm.add_rms_norm_quantize if added else norm.rms_norm_quantize
            codes, scale, *total = kernel(**moved({**call, "scale": given}, kernel_device), dtype=code)
            wanted = (ADD_RMS_NORM if added else RMS_NORM).reference(**call)
            normed = wanted[0] if added else wanted
            granularity = "token" if given is None else "tensor"
            right, used = quantize_reference(normed, given, dtype=code, granularity=granularity)
            assert codes.is_contiguous()
            assert (codes.shape, scale.shape, scale.dtype) == (right.shape, used.shape, used.dtype)
            torch.testing.assert_close(scale.cpu(), used, rtol=2e-2 if dtype in HALF else 1e-6, atol=0)
            steps = code_steps(codes.cpu(), right)
            assert steps.max() <= 1
            assert steps.float().mean() < 0.01
            if added:
                assert torch.equal(total[0].cpu(), wanted[1])
