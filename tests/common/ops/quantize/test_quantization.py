"""core/common/ops/quantize/symmetric.py against plain Python and exact integer arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.common.numerics import judge
from core.common.ops.quantize.symmetric import QUANTIZE, QUANTIZED_LINEAR, RANGES
from tests.common.ops.canonical_oracle import Call, assert_raises, in_fp64, run, sample

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
CODES = pytest.mark.parametrize("code", list(RANGES), ids=str)
FORMS: dict[str, Call] = {
    "token": {"granularity": "token"},
    "tensor": {"granularity": "tensor"},
    "group": {"granularity": "group", "group_size": 16},
}


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    normal = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (normal * scale).to(dtype)


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """Give every element its region's scale, as (..., 1 or groups) or a scalar."""
    if scale.dim() == 0:
        return scale.expand(like.shape)
    return scale.repeat_interleave(like.shape[-1] // scale.shape[-1], -1)


@CODES
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_values_come_back_within_half_a_step(
    form: str, magnitude: float, dtype: torch.dtype, code: torch.dtype
) -> None:
    x = randn(7, 48, dtype=dtype, scale=magnitude)
    codes, scale = run(QUANTIZE, {"x": x, "scale": None, "dtype": code, **FORMS[form]})
    assert codes.dtype == code and scale.dtype == (torch.float64 if dtype == torch.float64 else F32)
    steps = spread(scale, x).double()
    # fp8 has 3 bits of mantissa above 2**-6, so half a step is 1/16 of the value, or 2**-10 below.
    half = 0.5 * steps if code == torch.int8 else torch.maximum(x.double().abs() / 16, steps * 2.0**-10)
    assert ((codes.double() * steps - x.double()).abs() <= half * (1 + 1e-5)).all()


@CODES
@pytest.mark.parametrize("form", FORMS)
def test_scales_reach_the_largest_value(form: str, code: torch.dtype) -> None:
    x = randn(6, 48, dtype=BF16, scale=3.0)
    codes, scale = run(QUANTIZE, {"x": x, "scale": None, "dtype": code, **FORMS[form]})
    regions = {"token": x, "tensor": x.reshape(1, -1), "group": x.reshape(-1, 16)}[form]
    high = RANGES[code][1]
    want = [max(map(abs, row)) / high for row in regions.tolist()]
    torch.testing.assert_close(scale.flatten(), torch.tensor(want), rtol=1e-6, atol=0)
    assert codes.double().abs().max() == high


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(value=st.floats(-40, 40, width=32), scale=st.sampled_from([0.25, 0.125, 1.0]))
def test_given_scales_are_divided_by_and_codes_cut_off(value: float, scale: float) -> None:
    call: Call = {"x": torch.tensor([value]), "scale": torch.tensor(scale), "granularity": "tensor"}
    codes, used = run(QUANTIZE, call | {"dtype": torch.int8})
    # Powers of two divide exactly; round() of a fraction is to nearest even.
    assert codes.item() == max(-128, min(127, round(Fraction(value) / Fraction(scale))))
    assert used.item() == scale
    codes, _ = run(QUANTIZE, call | {"dtype": FP8, "scale": torch.tensor(scale / 64)})
    assert codes.double().isfinite().all()
    wanted = max(-448.0, min(448.0, value / scale * 64))
    assert abs(codes.double().item() - wanted) <= max(abs(wanted) / 16, 2.0**-10)


@CODES
def test_a_region_of_zeros_stays_zero(code: torch.dtype) -> None:
    for form in FORMS.values():
        codes, scale = run(QUANTIZE, {"x": torch.zeros(3, 48), "scale": None, "dtype": code, **form})
        assert (codes.double() == 0).all() and scale.isfinite().all() and (scale > 0).all()


def test_memory_order_does_not_matter() -> None:
    x = randn(5, 3, 48).transpose(0, 1)
    for form in FORMS.values():
        got = run(QUANTIZE, {"x": x, "scale": None, "dtype": torch.int8, **form})
        want = run(QUANTIZE, {"x": x.contiguous(), "scale": None, "dtype": torch.int8, **form})
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(got, want, strict=True))


def codes_of(code: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed, scale=40.0).clamp(*RANGES[code]).to(code)


SCALES = {
    "tensor by tensor": ((), ()),
    "tensor by channel": ((), (24, 1)),
    "token by channel": ((7, 1), (24, 1)),
    "token by (1, 1)": ((7, 1), (1, 1)),
    "group by block": ((7, 3), (3, 3)),
    "token by group": ((7, 1), (24, 6)),
}


@CODES
@pytest.mark.parametrize("out_dtype", [F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SCALES)
def test_the_linear_layer_is_that_of_the_values(
    name: str, bias: bool, out_dtype: torch.dtype, code: torch.dtype
) -> None:
    shapes = SCALES[name]
    x_scale, w_scale = (
        randn(*s, seed=i).abs() * 0.01 + 0.001 if s else torch.tensor(0.013) for i, s in enumerate(shapes)
    )
    x, w = codes_of(code, 7, 48), codes_of(code, 24, 48, seed=1)
    offset = randn(24, dtype=out_dtype, seed=2) if bias else None
    call = {"x_codes": x, "x_scale": x_scale, "w_codes": w, "w_scale": w_scale, "bias": offset, "out_dtype": out_dtype}
    blocks = w_scale.expand(24, -1) if w_scale.dim() and w_scale.shape[0] == 1 else w_scale
    if name == "group by block":
        blocks = torch.stack([w_scale[row // 8] for row in range(24)])

    def values(dtype: torch.dtype) -> Tensor:
        left, right = (c.to(dtype) * spread(s, c).to(dtype) for c, s in ((x, x_scale), (w, blocks)))
        out = torch.stack([(row * right).sum(-1) for row in left])
        return out if offset is None else out + offset.to(dtype)

    verdict = judge(run(QUANTIZED_LINEAR, call)[0], values(F32).to(out_dtype), values(torch.float64))
    assert verdict.passed, verdict
    torch.testing.assert_close(in_fp64(QUANTIZED_LINEAR, call)[0], values(torch.float64), rtol=1e-12, atol=1e-12)


def test_int8_by_one_scale_is_integer_arithmetic() -> None:
    x, w = codes_of(torch.int8, 7, 48), codes_of(torch.int8, 24, 48, seed=1)
    one = torch.tensor(1.0)
    call = {"x_codes": x, "x_scale": one, "w_codes": w, "w_scale": one, "bias": None, "out_dtype": F32}
    assert torch.equal(run(QUANTIZED_LINEAR, call)[0], (x.long() @ w.long().t()).float())


@CODES
def test_quantising_then_multiplying_approximates_the_layer(code: torch.dtype) -> None:
    x, w = randn(5, 2, 48, dtype=BF16), randn(24, 48, dtype=BF16, seed=1)
    (x_codes, x_scale), (w_codes, w_scale) = (run(QUANTIZE, {"x": t, "scale": None, "dtype": code}) for t in (x, w))
    call = {"x_codes": x_codes, "x_scale": x_scale, "w_codes": w_codes, "w_scale": w_scale, "bias": None}
    (got,) = run(QUANTIZED_LINEAR, call | {"out_dtype": BF16})
    want = x.double() @ w.double().t()
    relative = (got.double() - want).norm() / want.norm()
    assert got.shape == (5, 2, 24) and 1e-4 < relative < (0.02 if code == torch.int8 else 0.06)


@CODES
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_is_seen_in_a_scale_that_is_computed(code: torch.dtype, form: str) -> None:
    for value in (torch.nan, torch.inf):
        x = randn(3, 48)
        x[1, 5] = value
        codes, scale = QUANTIZE.reference(x, None, dtype=code, **FORMS[form])
        values = codes.float() * spread(scale, x)
        assert not values[1, :16].isfinite().any() and (form == "tensor" or values[0].isfinite().all())


@CODES
def test_int8_loses_nan_where_the_scale_is_given_and_fp8_keeps_it(code: torch.dtype) -> None:
    """The documented limit (docs/quantization.md): int8 has no code for NaN; infinity is cut off in both."""
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.25]])
    codes, _ = QUANTIZE.reference(x, torch.tensor(0.25), dtype=code, granularity="tensor")
    low, high = RANGES[code]
    assert codes.float()[0, 1:].tolist() == [high, low, 1.0]
    assert bool(codes.float()[0, 0].isnan()) is (code == FP8)


ROW: Call = {"granularity": "token", "group_size": 0}
NEAR_MISSES: dict[str, tuple[Any, Call, str]] = {
    "format": (QUANTIZE, {"dtype": torch.int16}, "dtype torch.int16 is none of torch.float8_e4m3fn, torch.int8"),
    "granularity": (QUANTIZE, {"granularity": "row"}, "granularity 'row' is none of 'token', 'tensor', 'group'"),
    "no group": (QUANTIZE, {"group_size": 0}, "group_size must be a positive divisor of 48, .* not 0"),
    "ragged group": (QUANTIZE, {"group_size": 32}, "group_size must be a positive divisor of 48, .* not 32"),
    "stray group": (QUANTIZE, {"granularity": "token"}, "group_size=16 has no meaning for granularity 'token'"),
    "scale": (QUANTIZE, {**ROW, "scale": torch.ones(7)}, r"scale must have shape \(7, 1\), not \(7,\)"),
    "integers": (QUANTIZE, {"x": torch.ones(7, 48).int()}, "x must be floating-point"),
    "sizes": (QUANTIZED_LINEAR, {"w_codes": torch.ones(24, 47).to(FP8)}, "differ in their last dimension"),
    "values": (QUANTIZED_LINEAR, {"x_codes": torch.ones(7, 48)}, "x_codes must be torch.float8_e4m3fn or torch.int8"),
    "w scale": (QUANTIZED_LINEAR, {"w_scale": torch.ones(5, 1)}, r"w_scale \(5, 1\) does not divide w_codes"),
    "flat scale": (QUANTIZED_LINEAR, {"w_scale": torch.ones(24)}, r"w_scale \(24,\) does not divide w_codes"),
    "x scale": (QUANTIZED_LINEAR, {"x_scale": torch.ones(7, 5)}, r"x_scale \(7, 5\) does not divide x_codes"),
    "integer scale": (QUANTIZED_LINEAR, {"x_scale": torch.ones(7, 1).int()}, "x_scale must be floating-point"),
    "bias": (QUANTIZED_LINEAR, {"bias": torch.ones(1)}, r"bias must have shape \(24,\), not \(1,\)"),
    "rank": (QUANTIZED_LINEAR, {"w_codes": torch.ones(1, 24, 48).to(FP8)}, "w_codes rank 2"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    op, change, message = NEAR_MISSES[near_miss]
    name = "float8_e4m3fn, group" if op is QUANTIZE else "float8_e4m3fn, token by channel"
    assert_raises(op, sample(op, name) | change, message)
