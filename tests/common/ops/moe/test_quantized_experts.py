"""core/common/ops/moe/quantized_experts.py: each row times the weight of its own expert, in both forms of the
reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import core.common.ops.moe.quantized_experts as module
from core.common.numerics import judge
from core.common.ops.linear.weight_only import unpacked
from core.common.ops.moe.quantized_experts import QUANTIZED_GROUPED_LINEAR as OP
from core.common.ops.quantize.symmetric import dequantize
from tests.common.ops.canonical_oracle import Call, assert_raises, every_sample, in_fp64, run, sample

NAMES = [each.name for each in every_sample(OP)]
F64 = torch.float64


def exact(call: Call) -> Tensor:
    """Compute row by row."""
    x, ends = call["x"], call["ends"].tolist()
    values = x.to(F64) if call["x_scale"] is None else dequantize(x, call["x_scale"], call.get("x_zero_point"), F64)
    codes = unpacked(call["w_codes"], call["num_bits"], x.shape[1])
    rows = []
    for row in range(x.shape[0]):
        expert = next((e for e, end in enumerate(ends) if row < end), None)
        if expert is None:
            rows.append(torch.zeros(codes.shape[1], dtype=F64))
            continue
        zero_point = None if call["w_zero_point"] is None else call["w_zero_point"][expert]
        rows.append(dequantize(codes[expert], call["w_scale"][expert], zero_point, F64) @ values[row])
    return torch.stack(rows) if rows else torch.zeros(0, codes.shape[1], dtype=F64)


@pytest.mark.parametrize("name", NAMES)
def test_each_row_meets_its_own_expert(name: str) -> None:
    call = sample(OP, name)
    torch.testing.assert_close(in_fp64(OP, call)[0], exact(call), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run(OP, call)[0].double(), exact(call), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if "no tokens" not in name])
def test_grouped_products_agree_with_one_expert_after_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = sample(OP, name, torch.bfloat16)
    taken = []
    grouped = module._grouped
    monkeypatch.setattr(module, "_grouped", lambda *args: taken.append(True) or grouped(*args))
    (fast,) = run(OP, call)
    assert taken, "torch._grouped_mm takes none of this"
    monkeypatch.setattr(module, "_fits_grouped", lambda *_: False)
    verdict = judge(fast, run(OP, call)[0], exact(call))
    assert verdict.passed, verdict


def test_rows_of_no_expert_are_zeros() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (out,) = run(OP, sample(OP, "int8, tensor, rows of no expert", dtype))
        assert (out[11:] == 0).all() and (out[:11] != 0).any(-1).all()


NEAR_MISSES: dict[str, tuple[Call, str]] = {
    "ends": ({"ends": torch.tensor([1, 2, 3, 11])}, "ends must be torch.int32"),
    "experts": ({"ends": torch.tensor([1, 11], dtype=torch.int32)}, r"of shape \(4,\)"),
    "no scale": ({"x_scale": None}, "x of torch.int8 without x_scale|without x_scale are no values"),
    "x scale": ({"x_scale": torch.ones(11)}, r"x_scale must have shape \(\) or \(11, 1\)"),
    "values": ({"x": torch.ones(11, 48)}, "x with x_scale must be"),
    "w scale": ({"w_scale": torch.ones(4, 24)}, "does not divide"),
    "rank": ({"x": torch.ones(1, 11, 48, dtype=torch.int8)}, "x must have rank 2"),
    "columns": ({"w_codes": torch.ones(4, 24, 40, dtype=torch.int8)}, "must have 48 columns"),
    "packed": (
        {"w_codes": torch.ones(4, 24, 6, dtype=torch.int32), "num_bits": 4},
        "packed weights go with x as values",
    ),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    change, message = NEAR_MISSES[near_miss]
    call: dict[str, Any] = sample(OP, "int8, token")
    assert_raises(OP, call | change, message)
