"""core/common/ops/quantize/fp4.py: codes, their order and rounding, and the scales of groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.common.ops.quantize.fp4 import GROUP, QUANTIZE_FP4
from tests.common.ops.canonical_oracle import assert_raises, run
from tests.common.processes import drawn

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def unpacked(codes: Tensor) -> Tensor:
    bits = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    return torch.where(bits >= 8, -1.0, 1.0) * VALUES[bits % 8]


def test_the_values_of_the_format_are_codes_of_their_own_two_in_a_byte() -> None:
    x = torch.cat((VALUES, -VALUES))[None]
    codes, group_scales, scale = run(QUANTIZE_FP4, {"x": x, "scale": torch.tensor(1.0)})
    assert codes.tolist() == [[low | low + 1 << 4 for low in range(0, 16, 2)]]
    assert (group_scales.float().tolist(), float(scale)) == ([[1.0]], 1.0)


def test_codes_are_those_of_torchs_own_dtype_where_it_has_one() -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4_e2m1fn_x2")
    codes, *_ = run(QUANTIZE_FP4, {"x": drawn(3, 32), "scale": None})
    assert codes.view(torch.float4_e2m1fn_x2).shape == (3, 16)


def test_ties_go_to_the_even_code_and_large_values_are_cut_off() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([*ties, *(-tie for tie in ties), 6.0, 6.0])
    codes, *_ = run(QUANTIZE_FP4, {"x": row[None], "scale": torch.tensor(1.0)})
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert unpacked(codes)[0].tolist() == [*wanted, *(-each for each in wanted), 6.0, 6.0]
    far = torch.full((1, GROUP), 1e6)
    codes, group_scales, _ = run(QUANTIZE_FP4, {"x": far, "scale": torch.tensor(1.0)})
    assert float(group_scales) == 448.0 and unpacked(codes).unique().tolist() == [6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_back_within_half_a_step(dtype: torch.dtype) -> None:
    x = drawn(5, 64, dtype=dtype) * 3
    codes, group_scales, scale = run(QUANTIZE_FP4, {"x": x, "scale": None})
    unit = group_scales.float().repeat_interleave(GROUP, -1) * scale
    values = unpacked(codes)
    step = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0))
    # A group's scale, itself rounded down, cuts its largest value off by up to a sixteenth.
    assert ((values * unit - x.float()).abs() <= unit * step / 2 * 1.001 + unit * 6 / 16).all()
    assert float(group_scales.float().max()) == 448.0
    assert torch.equal(unpacked(codes).abs().unflatten(-1, (-1, GROUP)).amax(-1), torch.full((5, 4), 6.0))


def test_a_group_of_zeros_has_codes_of_zero_and_others_are_not_touched() -> None:
    x = drawn(2, 32)
    x[0, :16] = 0
    codes, group_scales, _ = run(QUANTIZE_FP4, {"x": x, "scale": None})
    assert codes[0, :8].eq(0).all() and float(group_scales[0, 0]) == 0 and codes[0, 8:].ne(0).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"x": torch.ones(2, 24), "scale": None}, "x must have rows of a multiple of 16"),
        ({"x": torch.ones(2, 16, dtype=torch.int64), "scale": None}, "x must be floating-point"),
        ({"x": torch.ones(2, 16), "scale": torch.ones(2)}, "scale must have shape"),
    ],
)
def test_bad_arguments_are_refused(call: dict[str, object], message: str) -> None:
    assert_raises(QUANTIZE_FP4, call, message)
