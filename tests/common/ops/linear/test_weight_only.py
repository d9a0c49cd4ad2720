"""core/common/ops/linear/weight_only.py against plain Python: the layout of packed codes, groups, zero points."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import judge
from core.common.ops.linear.weight_only import WEIGHT_ONLY_LINEAR, unpack
from core.quantization.weights import pack
from tests.common.ops.canonical_oracle import Call, assert_raises, in_fp64, run, sample


def values(call: Call) -> Tensor:
    """Dequantise element by element."""
    inputs, scale, zeros = call["x"].shape[-1], call["w_scale"], call["w_zero_point"]
    rows = []
    for row, held in enumerate(call["w_codes"]):
        codes = [float(code) for code in held]
        if call["num_bits"] == 4:
            codes = [((int(word) & 0xFFFFFFFF) >> (4 * place) & 15) - 8.0 for word in held for place in range(8)]
        group = inputs // scale.shape[1]
        shifts = [0.0 if zeros is None else float(zeros[row, i // group]) for i in range(inputs)]
        rows.append([(codes[i] - shifts[i]) * float(scale[row, i // group]) for i in range(inputs)])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    "name", ["int8 by row", "int8 by group, zero points", "fp8 by row", "int4 by group, zero points", "int4, odd rows"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_layer_is_that_of_the_values(name: str, dtype: torch.dtype) -> None:
    call = sample(WEIGHT_ONLY_LINEAR, name, dtype)
    weight, x = values(call), call["x"]
    bias = torch.zeros(24) if call["bias"] is None else call["bias"]
    exact = x.double() @ weight.t() + bias.double()
    torch.testing.assert_close(in_fp64(WEIGHT_ONLY_LINEAR, call)[0], exact, rtol=1e-12, atol=1e-12)
    eager = (x.float() @ weight.float().t() + bias.float()).to(dtype)
    assert judge(run(WEIGHT_ONLY_LINEAR, call)[0], eager, exact).passed


@pytest.mark.parametrize(("num_bits", "columns"), [(4, 16), (4, 13), (8, 8), (8, 7)])
def test_packing_is_the_one_of_the_format(num_bits: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    least, most = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1
    codes = torch.randint(least, most + 1, (3, columns), generator=generator).to(torch.int8)
    codes[0, 0], codes[0, -1] = least, most
    packed, per_word = pack(codes, num_bits), 32 // num_bits
    assert packed.dtype == torch.int32 and packed.shape == (3, -(-columns // per_word))
    for row, words in zip(codes.tolist(), packed.tolist(), strict=True):
        for index, code in enumerate(row):
            word = words[index // per_word] & 0xFFFFFFFF
            assert (word >> (num_bits * (index % per_word))) & ((1 << num_bits) - 1) == code - least
    assert torch.equal(unpack(packed, num_bits, columns), codes)


NEAR_MISSES: dict[str, tuple[Call, str]] = {
    "bits": ({"num_bits": 3}, "num_bits must be 8 or 4, not 3"),
    "not packed": ({"w_codes": torch.ones(24, 48, dtype=torch.int8)}, "w_codes of 4 bits must be torch.int32"),
    "words": ({"w_codes": torch.ones(24, 5, dtype=torch.int32)}, r"w_codes \(24, 5\) must have 6 columns"),
    "group": ({"w_scale": torch.ones(24, 5)}, r"w_scale \(24, 5\) does not divide w_codes of shape \(24, 48\)"),
    "rows": ({"w_scale": torch.ones(1, 3)}, r"w_scale \(1, 3\) does not divide"),
    "zero point": ({"w_zero_point": torch.ones(24, 3)}, "w_zero_point must be torch.int8"),
    "zeros by row": ({"w_zero_point": torch.ones(24, 1, dtype=torch.int8)}, "must agree"),
    "bias": ({"bias": torch.ones(1)}, r"bias must have shape \(24,\)"),
    "integers": ({"x": torch.ones(7, 48).int()}, "x must be floating-point"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    change, message = NEAR_MISSES[near_miss]
    call: dict[str, Any] = sample(WEIGHT_ONLY_LINEAR, "int4 by group, zero points")
    assert_raises(WEIGHT_ONLY_LINEAR, call | change, message)
