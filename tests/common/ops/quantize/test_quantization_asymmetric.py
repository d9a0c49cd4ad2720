"""core/common/ops/quantize/asymmetric.py against plain Python; linear layers of codes with zero points."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.common.ops.quantize.asymmetric import QUANTIZE_ASYMMETRIC
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from tests.common.ops.canonical_oracle import Call, assert_raises, run, sample

DYNAMIC: Call = {"scale": None, "zero_point": None, "dtype": torch.int8}


@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1.0, 5.0), (1e-3, -1.0), (1e3, 0.0)])
def test_values_come_back_within_half_a_step_and_zero_exactly(
    granularity: str, dtype: torch.dtype, scale: float, shift: float
) -> None:
    normal = torch.randn(7, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (normal * scale + shift).to(dtype)
    x[0, 3] = 0.0
    codes, step, zero = run(QUANTIZE_ASYMMETRIC, {"x": x, **DYNAMIC, "granularity": granularity})
    assert codes.dtype == zero.dtype == torch.int8 and step.shape == zero.shape == (
        () if granularity == "tensor" else (7, 1)
    )
    back = (codes.double() - zero.double()) * step.double()
    # The zero point is rounded, so an end of the range may be cut off by half a step more.
    assert ((back - x.double()).abs() <= step.double() * (1 + 1e-5)).all()
    inner = (codes > -128) & (codes < 127)
    assert ((back - x.double()).abs()[inner] <= (0.5 * step.double() * (1 + 1e-5)).expand(7, 48)[inner]).all()
    assert back[0, 3] == 0.0


def test_one_sided_values_use_all_codes() -> None:
    x = torch.linspace(0.0, 6.0, 48)[None]
    codes, step, zero = run(QUANTIZE_ASYMMETRIC, {"x": x, **DYNAMIC})
    assert (codes.min(), codes.max(), zero.item()) == (-128, 127, -128)
    torch.testing.assert_close(step, torch.tensor([[6.0 / 255]]))


def test_given_scales_and_zero_points_are_used_as_they_are() -> None:
    x = torch.tensor([[-1.0, 0.0, 0.25, 0.375, 100.0]])
    given = {"scale": torch.tensor(0.25), "zero_point": torch.tensor(3, dtype=torch.int8), "granularity": "tensor"}
    codes, _, zero = run(QUANTIZE_ASYMMETRIC, {"x": x, **DYNAMIC, **given})
    # 0.375 / 0.25 + 3 is 4.5, to nearest even.
    assert codes.tolist() == [[-1, 3, 4, 4, 127]] and zero.item() == 3


def test_a_layer_of_such_codes_is_integer_arithmetic() -> None:
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-128, 128, shape, generator=generator).to(torch.int8) for shape in ((7, 48), (24, 48)))
    zeros = [torch.randint(-128, 128, shape, generator=generator).to(torch.int8) for shape in ((7, 1), (24, 1))]
    call = {
        "x_codes": x, "x_scale": torch.ones(7, 1), "w_codes": w, "w_scale": torch.ones(24, 1), "bias": None,
        "out_dtype": torch.float32, "x_zero_point": zeros[0], "w_zero_point": zeros[1],
    }  # fmt: skip
    want = (x.long() - zeros[0].long()) @ (w.long() - zeros[1].long()).t()
    assert torch.equal(run(QUANTIZED_LINEAR, call)[0], want.float())


NEAR_MISSES: dict[str, tuple[Call, str]] = {
    "format": ({"dtype": torch.float8_e4m3fn}, "dtype must be torch.int8"),
    "granularity": ({"granularity": "group"}, "granularity 'group' is none of 'token', 'tensor'"),
    "one of both": ({"zero_point": None}, "scale and zero_point must be given both, or neither"),
    "scale": ({"scale": torch.ones(7)}, r"scale must have shape \(7, 1\)"),
    "zero point": ({"zero_point": torch.ones(7, 1)}, "zero_point must be torch.int8"),
    "zero point's shape": ({"zero_point": torch.ones((), dtype=torch.int8)}, r"zero_point must have shape \(7, 1\)"),
    "integers": ({"x": torch.ones(7, 48).int()}, "x must be floating-point"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    change, message = NEAR_MISSES[near_miss]
    assert_raises(QUANTIZE_ASYMMETRIC, sample(QUANTIZE_ASYMMETRIC, "token, given scale") | change, message)


LINEAR_MISSES: dict[str, tuple[Call, str]] = {
    "fp8": ({"x_codes": torch.ones(7, 48).to(torch.float8_e4m3fn)}, "x_zero_point is for int8 codes"),
    "dtype": ({"x_zero_point": torch.ones(7, 1).int()}, "x_zero_point must be torch.int8"),
    "shape": ({"w_zero_point": torch.ones(24, dtype=torch.int8)}, r"w_zero_point \(24,\) and w_scale"),
}


@pytest.mark.parametrize("near_miss", LINEAR_MISSES)
def test_zero_points_of_a_layer_that_do_not_fit_raise(near_miss: str) -> None:
    change, message = LINEAR_MISSES[near_miss]
    call: dict[str, Any] = sample(QUANTIZED_LINEAR, "zero points, token by channel")
    assert_raises(QUANTIZED_LINEAR, call | change, message)
