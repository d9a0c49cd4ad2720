"""core/common/ops/mlp/activation.py against transformers' own activations and expert gates, bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from core.common.ops.mlp.activation import ACTIVATIONS, GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from tests.common.ops.canonical_oracle import Call, assert_bitwise, assert_raises, run, sample

F32, BF16 = torch.float32, torch.bfloat16
THEIRS = {"gelu_tanh": "gelu_pytorch_tanh"}
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


@DTYPES
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_each_kind_is_the_models_own(kind: str, dtype: torch.dtype) -> None:
    act = ACT2FN[THEIRS.get(kind, kind)]
    for rows, scale in ((37, 2.0), (0, 1.0), (9, 30.0)):
        gate, up = randn(rows, 40, dtype=dtype, scale=scale), randn(rows, 40, dtype=dtype, seed=1)
        assert_bitwise(GATED_ACTIVATION, {"gate": gate, "up": up, "kind": kind}, lambda g=gate, u=up: act(g) * u)
        # Vectorised and scalar code differ in the last bit: eager must see the same strides.
        first, second = torch.cat((gate, up), dim=-1).chunk(2, dim=-1)
        call = {"gate_up": torch.cat((gate, up), dim=-1), "kind": kind}
        assert_bitwise(GATED_ACTIVATION_FUSED, call, lambda g=first, u=second: act(g) * u)
        assert_bitwise(GATED_ACTIVATION_FUSED, call | {"gate_first": False}, lambda g=second, u=first: u * act(g))


def gate_of(experts: type, **fields: Any) -> Any:
    """Return the gate of an experts module without its weights."""
    module = experts.__new__(experts)
    torch.nn.Module.__init__(module)
    for name, value in fields.items():
        setattr(module, name, value)
    return module._apply_gate


@DTYPES
def test_clamped_gates_are_the_models_own(dtype: torch.dtype) -> None:
    both = randn(37, 80, dtype=dtype, scale=9.0)
    assert (both.abs() > 7).any()
    gpt_oss = {"kind": "quick_gelu", "interleaved": True, "limit": 7.0, "up_offset": 1.0}
    theirs = gate_of(GptOssExperts, limit=7.0, alpha=1.702)
    assert_bitwise(GATED_ACTIVATION_FUSED, {"gate_up": both, **gpt_oss}, lambda: theirs(both))
    deepseek = gate_of(DeepseekV4Experts, limit=6.5, act_fn=ACT2FN["silu"])
    assert_bitwise(GATED_ACTIVATION_FUSED, {"gate_up": both, "kind": "silu", "limit": 6.5}, lambda: deepseek(both))


def test_promotion_is_eagers() -> None:
    gate, up = randn(5, 40, dtype=BF16), randn(5, 40, seed=1)
    call: Call = {"gate": gate, "up": up, "kind": "silu"}
    assert_bitwise(GATED_ACTIVATION, call, lambda: torch.nn.functional.silu(gate) * up)
    assert run(GATED_ACTIVATION, call)[0].dtype == F32


def test_rounding_follows_the_activation() -> None:
    gate, up = randn(37, 40, dtype=BF16), randn(37, 40, dtype=BF16, seed=1)
    once = (torch.nn.functional.silu(gate.float()) * up.float()).to(BF16)
    assert not torch.equal(run(GATED_ACTIVATION, {"gate": gate, "up": up, "kind": "silu"})[0], once)


FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_new": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    kind=st.sampled_from(sorted(ACTIVATIONS)),
    gate=st.floats(-20, 20),
    up=st.floats(-20, 20),
    limit=st.sampled_from([0.0, 0.0, 1.5, 7.0]),
    up_offset=st.sampled_from([0.0, 1.0]),
)
def test_one_element_by_formula(kind: str, gate: float, up: float, limit: float, up_offset: float) -> None:
    pair = torch.tensor([gate, up], dtype=torch.float64)
    options = {"kind": kind, "limit": limit, "up_offset": up_offset}
    if limit:
        gate, up = min(gate, limit), max(min(up, limit), -limit)
    want = torch.tensor([FORMULAS[kind](gate) * (up + up_offset)], dtype=torch.float64)
    for interleaved in (False, True):
        (got,) = run(GATED_ACTIVATION_FUSED, {"gate_up": pair, "interleaved": interleaved, **options})
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


NEAR_MISSES: dict[str, tuple[Any, Call, str]] = {
    "unknown kind": (GATED_ACTIVATION, {"kind": "swish"}, "kind 'swish' is none of 'silu', 'gelu'"),
    "shapes": (GATED_ACTIVATION, {"up": torch.ones(7, 1)}, r"up must have shape \(7, 40\), not \(7, 1\)"),
    "integers": (GATED_ACTIVATION, {"gate": torch.ones(7, 40).int()}, "gate must be floating-point, not torch.int32"),
    "negative limit": (GATED_ACTIVATION, {"limit": -7.0}, "limit must be positive, or 0 for none, not -7.0"),
    "unknown fused kind": (GATED_ACTIVATION_FUSED, {"kind": ""}, "kind '' is none of"),
    "odd": (GATED_ACTIVATION_FUSED, {"gate_up": torch.ones(3, 5)}, r"gate_up \(3, 5\) must be even"),
    "scalar": (GATED_ACTIVATION_FUSED, {"gate_up": torch.tensor(1.0)}, r"gate_up \(\) must be even"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    op, change, message = NEAR_MISSES[near_miss]
    assert_raises(op, sample(op, "silu") | change, message)
