"""core/common/ops/linear/gated.py: torch's linear, and the gate after it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from core.common.numerics import judge
from core.common.ops.declaration import CanonicalOp
from core.common.ops.linear.gated import GATED_LINEAR, LINEAR
from core.common.ops.mlp.activation import ACTIVATIONS
from tests.common.ops.canonical_oracle import assert_bitwise, assert_raises, every_sample, run, sample

half_and_full = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@half_and_full
def test_a_linear_is_torchs_own(dtype: torch.dtype) -> None:
    for one in every_sample(LINEAR, dtype):
        call = dict(one.kwargs)
        assert_bitwise(LINEAR, call, partial(functional.linear, call["x"], call["weight"], call["bias"]))
        del call["bias"]
        if one.kwargs["bias"] is None:
            assert_bitwise(LINEAR, call, partial(functional.linear, call["x"], call["weight"]))


@half_and_full
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_gate_is_that_of_a_mlp_as_models_write_it(kind: str, dtype: torch.dtype) -> None:
    call = sample(GATED_LINEAR, kind, dtype)
    x, weight, act = call["x"], call["weight"], ACTIVATIONS[kind]

    def mlp(gate: slice, up: slice) -> Any:
        whole = functional.linear(x, weight)
        return act(whole[..., gate]) * whole[..., up]

    first, second = slice(0, 32), slice(32, 64)
    assert_bitwise(GATED_LINEAR, call, lambda: mlp(first, second))
    assert_bitwise(GATED_LINEAR, call | {"gate_first": False}, lambda: mlp(second, first))
    even, odd = slice(0, None, 2), slice(1, None, 2)
    assert_bitwise(GATED_LINEAR, call | {"interleaved": True}, lambda: mlp(even, odd))


def test_clamped_and_offset_as_in_gpt_oss() -> None:
    call = sample(GATED_LINEAR, "gpt-oss")
    whole = functional.linear(call["x"], call["weight"], call["bias"])
    gate, up = whole[..., ::2].clamp(max=7.0), whole[..., 1::2].clamp(min=-7.0, max=7.0)
    assert whole.abs().max() > 7.0
    assert_bitwise(GATED_LINEAR, call, lambda: gate * torch.sigmoid(1.702 * gate) * (up + 1.0))


def test_the_result_may_stay_wide_before_the_gate() -> None:
    """A kernel that rounds once, at the end, is as near to the truth as the reference."""
    call = sample(GATED_LINEAR, "odd rows", torch.bfloat16)
    x, weight, bias = (call[name].double() for name in ("x", "weight", "bias"))
    gate, up = functional.linear(x, weight, bias).chunk(2, dim=-1)
    truth = functional.silu(gate) * up
    (reference,) = run(GATED_LINEAR, call)
    wide = functional.linear(x.float(), weight.float(), bias.float()).chunk(2, dim=-1)
    once = (functional.silu(wide[0]) * wide[1]).bfloat16()
    assert not torch.equal(once, reference)
    assert judge(once, reference, truth).passed


GATED: dict[str, Any] = {"kind": "silu"}
NEAR_MISSES: dict[str, tuple[CanonicalOp, dict[str, Any], str]] = {
    "another width": (LINEAR, {"x": torch.ones(7, 47)}, r"x \(7, 47\) and weight \(40, 48\)"),
    "a scalar": (LINEAR, {"x": torch.tensor(1.0)}, r"x \(\) and weight"),
    "a vector for a weight": (LINEAR, {"weight": torch.ones(48)}, r"weight \(48,\)"),
    "other dtypes": (LINEAR, {"x": torch.ones(7, 48, dtype=torch.bfloat16)}, "x is torch.bfloat16, weight"),
    "a wider bias": (LINEAR, {"bias": torch.ones(40, dtype=torch.float64)}, "bias torch.float64"),
    "a longer bias": (LINEAR, {"bias": torch.ones(41)}, r"bias must have shape \(40,\), not \(41,\)"),
    "integers": (LINEAR, {"x": torch.ones(7, 48, dtype=torch.int64)}, "x must be floating-point"),
    "an odd number of rows": (GATED_LINEAR, {"weight": torch.ones(63, 48), "bias": None}, "not 63 in all"),
    "unknown kind": (GATED_LINEAR, {"kind": "swish"}, "kind 'swish' is none of"),
    "negative limit": (GATED_LINEAR, {"limit": -1.0}, "limit must be positive"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_other_arguments_are_refused_by_kernel_and_fake(case: str) -> None:
    op, change, message = NEAR_MISSES[case]
    assert_raises(op, sample(op, "odd rows") | change, message)
