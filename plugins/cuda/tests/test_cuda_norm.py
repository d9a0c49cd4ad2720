"""core_cuda/ops/norm/norms.py against the references of the canonical ops: numbers, layouts, rows of any length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from core.common.ops.norm.norms import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from core.common.ops.norm.quantized import ADD_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE
from tests.kernel_cases import CODED, CPU, DTYPES, check, check_codes, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.implementations import IMPLEMENTATIONS
from core_cuda.ops.norm import norms as norm

OPS = (RMS_NORM, ADD_RMS_NORM, LAYER_NORM)
CODED_OPS = (RMS_NORM_QUANTIZE, ADD_RMS_NORM_QUANTIZE)
HALF = (torch.bfloat16, torch.float16)


def kernel_for(op: Any) -> Any:
    return getattr(norm, op.name)


def taken(op: Any, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls that the condition of the op's kernel takes; most of them."""
    (implementation,) = (each for each in IMPLEMENTATIONS if each.op == op.qualified_name)
    found = [call for call in calls if implementation.condition(op.bind((), call)) is None]
    assert len(found) > len(calls) // 3
    return found


def call_of(op: Any, x: torch.Tensor, **options: Any) -> dict[str, Any]:
    width = x.shape[-1]
    weight = randn(width, dtype=options.pop("weight", x.dtype), seed=7, scale=0.4, shift=1.0)
    call = {"x": x, "weight": weight, "eps": 1e-5, **options}
    if op is LAYER_NORM:
        call |= {"bias": randn(width, dtype=x.dtype, seed=8)}
    if op in (ADD_RMS_NORM, ADD_RMS_NORM_QUANTIZE):
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


def forms_of(dtype: torch.dtype) -> Iterator[torch.Tensor]:
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
    calls = [call_of(op, x, **extra) for x in forms_of(torch.bfloat16) for extra in ({}, {"out_dtype": torch.float32})]
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
        norm.run_norm({"x": x, "residual": None}, {"out": out.zero_(), "total": None}, options, config=config)
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", CODED_OPS, ids=lambda op: op.name)
def test_codes_agree_with_the_reference_on_its_samples(
    op: Any, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check_codes(op, taken(op, [s.kwargs for s in op.samples(dtype, CPU)]), kernel_for(op), kernel_device)


@pytest.mark.parametrize(("dtype", "code"), CODED, ids=str)
@pytest.mark.parametrize("width", [64, 63, 4096, 40_000])
def test_codes_are_those_of_the_normed_rows(
    width: int, dtype: torch.dtype, code: torch.dtype, kernel_device: torch.device
) -> None:
    x, residual, weight = randn(3, width, dtype=dtype), randn(3, width, dtype=dtype, seed=1), randn(width, seed=2)
    options = {"weight": weight.to(dtype), "eps": 1e-6, "normed_dtype": dtype, "dtype": code}
    forms: list[dict[str, Any]] = [
        {"scale": None},
        {"scale": torch.tensor(0.02), "granularity": "tensor"},
        {"scale": None, "granularity": "group", "group_size": 32},
    ]
    for op in CODED_OPS:
        tensors = {"x": x} if op is RMS_NORM_QUANTIZE else {"x": x, "residual": residual}
        calls = [{**tensors, **options, **form} for form in forms[: 2 if width == 63 else 3]]
        check_codes(op, calls, kernel_for(op), kernel_device)


def test_a_given_scale_is_returned_in_memory_of_its_own(kernel_device: torch.device) -> None:
    for rows in (3, 0):
        scale = torch.tensor(0.02, device=kernel_device)
        call = moved(call_of(RMS_NORM, randn(rows, 64)), kernel_device)
        _, used = norm.rms_norm_quantize(**call, scale=scale, dtype=torch.int8, granularity="tensor")
        assert used.item() == scale.item() and used.data_ptr() != scale.data_ptr()


def test_rows_and_residuals_may_lie_in_memory_in_any_way_before_codes(kernel_device: torch.device) -> None:
    forms = ({}, {"granularity": "group", "group_size": 16})
    calls = [
        {**call_of(op, x), "scale": None, "dtype": torch.int8, **form}
        for op in (ADD_RMS_NORM_QUANTIZE,)
        for x in forms_of(torch.bfloat16)
        for form in forms
    ]
    check_codes(ADD_RMS_NORM_QUANTIZE, calls, norm.add_rms_norm_quantize, kernel_device)


def test_calls_that_the_kernels_do_not_take_are_refused_with_a_reason() -> None:
    def reason(**options: Any) -> str | None:
        (implementation,) = (each for each in IMPLEMENTATIONS if each.op == RMS_NORM_QUANTIZE.qualified_name)
        call = {**call_of(RMS_NORM, randn(4, 48)), "scale": None, "dtype": torch.int8, **options}
        return implementation.condition(RMS_NORM_QUANTIZE.bind((), call))

    assert reason() is None
    assert reason(granularity="group", group_size=16) is None
    assert reason(granularity="tensor", scale=torch.tensor(0.1)) is None
    assert reason(granularity="group", group_size=12) == "group_size is 12, and the kernel takes powers of two"
    assert "no program sees all of them" in str(reason(granularity="tensor"))
    assert "a scale is given by token" in str(reason(scale=torch.ones(4, 1)))
    assert "x is torch.float64" in str(reason(x=randn(4, 48, dtype=torch.float64)))
    assert "compute_dtype is torch.bfloat16" in str(reason(compute_dtype=torch.bfloat16))
