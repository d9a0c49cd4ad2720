"""Which calls the plugin's implementations take and why not the others; layouts and lengths. Needs no torch_npu."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from typing import Any

import npu_calls
import pytest
import torch
from npu_calls import LENGTHS, Call, attention_call
from npu_kernel_cases import ALONE, BY_NAME, own_calls, reason, sampled, taken
from torch import Tensor

from core.common.ops.declaration import find_op
from core.common.passes.writes import find_writes
from core.errors import UsageError
from core_npu.implementations import IMPLEMENTATIONS
from core_npu.ops import attention as paged
from core_npu.ops.attention_lengths import decode_keys, packed_ends, packed_keys
from core_npu.ops.layout import rows_of
from tests.kernel_cases import randn
from tests.support import refused

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.slow
def test_nothing_here_imports_torch_npu() -> None:
    modules = "core_npu.implementations, core_npu.fakes.declared, core_npu.plugin"
    program = f"import sys; sys.modules['torch_npu'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_each_op_is_implemented_once_and_exists() -> None:
    names = [each.op for each in IMPLEMENTATIONS]
    assert len(set(names)) == len(names) == len({each.name for each in IMPLEMENTATIONS})
    assert {name.removeprefix("core::") for name in names} <= set(BY_NAME)


@pytest.mark.cases(5)
@pytest.mark.parametrize("implementation", ALONE, ids=lambda each: each.op)
def test_each_implementation_takes_some_calls_and_refuses_others_with_a_reason(implementation: Any) -> None:
    op = BY_NAME[implementation.op.removeprefix("core::")]
    assert taken(op, own_calls(op, BF16))
    refusals = [reason(op, call) for dtype in (FP64, FP32, BF16) for call in sampled(op, dtype)]
    assert any(refusals) and all(text is None or (text and "\n" not in text) for text in refusals)
    assert all(reason(op, call) is not None for call in sampled(op, FP64) if call), "fp64 is of no kernel"


def test_attention_writes_what_its_schema_says() -> None:
    graph = torch.fx.Graph()
    call = attention_call(BF16, **LENGTHS["decode"])
    places = {name: graph.placeholder(name) for name, value in call.items() if isinstance(value, Tensor)}
    node = graph.call_function(paged.attention, kwargs={**call, **places})
    graph.output(node)
    writes = find_writes(torch.fx.GraphModule({}, graph))
    assert [name for name, place in places.items() if writes.writers(place)] == ["key_cache", "value_cache"]
    assert find_op(paged.attention) is None  # so no implementation is chosen for it again


# Conditions: op, a call that is taken, what is changed, and what the reason says.

NORM: Call = {"x": randn(4, 48, dtype=BF16), "weight": randn(48, dtype=BF16), "eps": 1e-6}
SUM: Call = {**NORM, "residual": randn(4, 48, dtype=BF16)}
CODED_SUM: Call = {**SUM, "scale": None, "dtype": torch.int8}
GATE: Call = {"gate_up": randn(4, 80, dtype=BF16), "kind": "silu"}
CODED_GATE: Call = {"gate": randn(4, 128, dtype=BF16), "up": None, "scale": None, "kind": "silu", "dtype": torch.int8}
ROWS: Call = {"x": randn(4, 48, dtype=BF16), "scale": None, "dtype": torch.int8}
ZEROS: Call = {
    **ROWS,
    "scale": torch.tensor(0.1),
    "zero_point": torch.tensor(3).to(torch.int8),
    "granularity": "tensor",
}
LINEAR: Call = {
    "x_codes": torch.ones(7, 48, dtype=torch.int8),
    "x_scale": torch.ones(7, 1),
    "w_codes": torch.ones(24, 48, dtype=torch.int8),
    "w_scale": torch.ones(24, 1),
    "bias": None,
    "out_dtype": BF16,
}
WEIGHT: Call = {
    "x": randn(7, 96, dtype=BF16),
    "w_codes": torch.ones(24, 96, dtype=torch.int8),
    "w_scale": torch.ones(24, 1),
    "w_zero_point": None,
    "bias": None,
}
TURN: Call = {name: randn(2, 4, 5, 32, dtype=BF16) for name in ("query", "key")}
TURN |= {name: randn(2, 1, 5, 32, dtype=BF16) for name in ("cos", "sin")}
ROUTE: Call = {"logits": randn(4, 16, dtype=BF16), "top_k": 2}
EXPERTS: Call = {
    "x": randn(4, 16, dtype=BF16),
    "weights": randn(4, 2, dtype=BF16),
    "indices": torch.zeros(4, 2, dtype=torch.int64),
    "gate_up": randn(5, 48, 16, dtype=BF16),
    "down": randn(5, 16, 24, dtype=BF16),
    "kind": "silu",
}
STEP = attention_call(BF16, **LENGTHS["decode"])
PROMPT = attention_call(BF16, **LENGTHS["prefill"])
TURNED = {**STEP, **npu_calls.tables(3, 64, BF16)}


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step(size: int = 64, page: int = 16, heads: tuple[int, int] = (4, 2), **more: Any) -> Call:
    return {**attention_call(BF16, **LENGTHS["decode"], size=size, page=page, heads=heads), **more}


CASES: list[tuple[str, Call, Call, str]] = [
    ("rms_norm", NORM, {"offset": 0.5}, "offset is 0.5, and the kernels add 0 or 1"),
    ("rms_norm", NORM, {"out_dtype": FP32}, "out_dtype is torch.float32, and the kernel's result has x's"),
    ("rms_norm", NORM, {"compute_dtype": FP16}, "compute_dtype is torch.float16 and x torch.bfloat16"),
    ("rms_norm", NORM, {"weight": randn(48, dtype=FP16)}, "weight is torch.float16 and x torch.bfloat16"),
    ("rms_norm", NORM, {"x": randn(*[1] * 8, 48, dtype=BF16)}, "x has 9 dimensions, and the kernel takes 8"),
    ("rms_norm", NORM, {"weight": randn(48), "offset": 1.0}, "weight is torch.float32 and x torch.bfloat16"),
    ("add_rms_norm", SUM, {"weight": randn(48)}, "weight is torch.float32 and x torch.bfloat16"),
    ("add_rms_norm", SUM, {"residual": randn(4, 48)}, "residual is torch.float32"),
    ("add_rms_norm", SUM, {"offset": 1.0}, "the kernel that adds takes the weight as it is"),
    ("add_rms_norm_quantize", CODED_SUM, {"dtype": torch.float8_e4m3fn}, "makes codes of torch.int8"),
    ("add_rms_norm_quantize", CODED_SUM, {"granularity": "tensor"}, "scales are to be made by tensor"),
    ("add_rms_norm_quantize", CODED_SUM, {"scale": torch.ones(4, 1)}, "a scale is given by token"),
    (
        "add_rms_norm_quantize",
        CODED_SUM,
        {"scale": torch.tensor(0.1), "granularity": "tensor"},
        "it would round the scale of other rows to half precision",
    ),
    ("gated_activation_fused", GATE, {"kind": "relu"}, "kind is 'relu', and the kernels know 'silu', 'quick_gelu'"),
    ("gated_activation_fused", GATE, {"gate_first": False}, "the gate is the second half"),
    ("gated_activation_fused", GATE, {"interleaved": True}, "limit is 0"),
    ("gated_activation_fused", GATE, {"kind": "quick_gelu"}, "limit is 0"),
    ("gated_activation_fused", GATE, {"kind": "gelu", "limit": 1.0}, "its kernel knows no limit"),
    ("gated_activation_quantize", CODED_GATE, {"up": randn(4, 128, dtype=BF16)}, "gate and up are two tensors"),
    ("gated_activation_quantize", CODED_GATE, {"gate": randn(4, 96, dtype=BF16)}, "takes multiples of 64"),
    ("gated_activation_quantize", CODED_GATE, {"gate": randn(4, 128)}, "gate is torch.float32"),
    ("gated_activation_quantize", CODED_GATE, {"gate": randn(128, dtype=BF16)}, "gate has rank 1"),
    ("gated_activation_quantize", CODED_GATE, {"kind": "gelu"}, "kind is 'gelu', and the kernel knows 'silu'"),
    ("gated_activation_quantize", CODED_GATE, {"scale": torch.ones(4, 1)}, "makes one scale for each token"),
    ("quantize", ROWS, {"x": randn(4, 48)}, "x is torch.float32, and the kernel takes torch.bfloat16"),
    ("quantize", ROWS, {"x": randn(48, dtype=BF16)}, "x has rank 1, and the kernel takes 2 or more"),
    ("quantize", ROWS, {"granularity": "group", "group_size": 16}, "scales are to be made by group"),
    ("quantize", ROWS, {"scale": torch.ones(4, 1)}, "a scale is given by token"),
    ("quantize", ROWS, {"scale": torch.ones((), dtype=FP64), "granularity": "tensor"}, "scale is torch.float64"),
    ("quantize_asymmetric", ZEROS, {"scale": None, "zero_point": None}, "zero would have no code"),
    ("quantized_linear", LINEAR, {"out_dtype": FP32}, "out_dtype is torch.float32"),
    ("quantized_linear", LINEAR, {"x_scale": torch.ones(7, 3)}, "x has a scale for each group"),
    ("quantized_linear", LINEAR, {"x_scale": torch.ones(1, 1)}, "several tokens of x share a scale"),
    ("quantized_linear", LINEAR, {"w_scale": torch.ones(24, 3)}, "w has a scale for each group or block"),
    ("quantized_linear", LINEAR, {"w_scale": torch.ones(3, 1)}, "w has a scale for each group or block"),
    ("quantized_linear", LINEAR, {"x_zero_point": torch.zeros(7, 1, dtype=torch.int8)}, "codes have zero points"),
    ("quantized_linear", LINEAR, {"x_scale": torch.ones(7, 1, dtype=FP64)}, "x_scale is torch.float64"),
    (
        "quantized_linear",
        LINEAR,
        {"w_codes": empty(65536, 48, dtype=torch.int8), "w_scale": empty(65536, 1, dtype=FP32)},
        "takes sizes up to 65535",
    ),
    ("weight_only_linear", WEIGHT, {"x": randn(7, 96)}, "x is torch.float32"),
    ("weight_only_linear", WEIGHT, {"x": randn(7, 96, dtype=FP16)}, "whose small numbers torch.float16 does not have"),
    ("weight_only_linear", WEIGHT, {"w_scale": torch.ones(24, 6)}, "a scale goes with 16 neighbours"),
    ("weight_only_linear", WEIGHT, {"num_bits": 4}, "codes of 4 bits are stored off zero"),
    ("weight_only_linear", WEIGHT, {"bias": randn(24)}, "bias is torch.float32 and x torch.bfloat16"),
    ("rotary", TURN, {"query": randn(2, 4, 5, 32, dtype=FP64)}, "query is torch.float64"),
    ("rotary", TURN, {"compute_dtype": FP64}, "compute_dtype is torch.float64"),
    ("rotary", TURN, {name: randn(2, 4, 5, 32, dtype=BF16) for name in ("cos", "sin")}, "each head of query has a row"),
    ("rotary", TURN, {name: randn(2, 1, 1, 32, dtype=BF16) for name in ("cos", "sin")}, "tokens of query share a row"),
    ("rotary", TURN, {"key": randn(2, 1, 5, 32, dtype=BF16)[None]}, "key has rank 5"),
    (
        "rotary",
        {name: randn(3, 2, 32, dtype=BF16) for name in ("query", "key")}
        | {name: randn(3, 1, 32, dtype=BF16) for name in ("cos", "sin")},
        {name: empty(3, 2, 896) for name in ("query", "key")} | {n: empty(3, 1, 896) for n in ("cos", "sin")},
        "896 features are rotated, and the kernel takes fewer than 896",
    ),
    ("rotary", TURN, {"query": empty(2, 1000, 5, 32)}, "query has 1000 heads"),
    ("moe_route", ROUTE, {"scoring": "sqrtsoftplus"}, "the kernels know softmax and sigmoid"),
    ("moe_route", ROUTE, {"scoring": "sigmoid"}, "scoring is 'sigmoid' and renormalize False"),
    ("moe_route", ROUTE, {"renormalize": True, "scale": 2.0}, "scoring is 'softmax' and renormalize True"),
    ("moe_route", ROUTE, {"renormalize": True, "renormalize_eps": 1e-9}, "without an epsilon"),
    ("moe_route", ROUTE, {"scoring": "softmax_selected", "scale": 2.0}, "no kernel has both"),
    ("moe_route", ROUTE, {"out_dtype": FP16}, "out_dtype is torch.float16 and logits torch.bfloat16"),
    ("moe_route", ROUTE, {"num_groups": 8, "top_groups": 2}, "8 groups have 2 experts each"),
    ("moe_route", ROUTE, {"num_groups": 4, "top_groups": 2, "scored_per_group": 3}, "and the kernel takes 1 or 2"),
    ("moe_route", ROUTE, {"logits": empty(4, 2), "bias": empty(2)}, "there are 2 experts, and the kernel takes more"),
    (
        "moe_route",
        ROUTE,
        {"logits": empty(4, 1), "top_k": 1, "scoring": "sigmoid", "renormalize": True},
        "there are 1 experts",
    ),
    ("moe_route", ROUTE, {"logits": empty(4, 2049)}, "the kernel takes 1024 of 2048"),
    ("grouped_mlp", EXPERTS, {"gate_up_bias": randn(5, 48, dtype=BF16)}, "experts have biases"),
    ("grouped_mlp", EXPERTS, {"gate_up": randn(5, 48, 16)}, "gate_up is torch.float32 and x torch.bfloat16"),
    ("grouped_mlp", EXPERTS, {"gate_up": empty(1025, 48, 16), "down": empty(1025, 16, 24)}, "takes 1024 of 65535"),
    ("attention", STEP, {"softcap": 30.0}, "scores are capped"),
    ("attention", STEP, {"sinks": randn(4, dtype=BF16)}, "there are sinks"),
    ("attention", STEP, {"mask": torch.ones(3, 1, 48, dtype=torch.bool)}, "there is a mask"),
    ("attention", STEP, {"causal": False, "window": 3}, "there is a window that is not causal"),
    ("attention", STEP, {"window": 3, "chunked": True}, "each token sees its own chunk"),
    ("attention", STEP, {"query": randn(3, 4, 64)}, "query is torch.float32"),
    (
        "attention",
        STEP,
        {"key_cache": empty(9, 16, 2, 64, dtype=torch.float8_e4m3fn)},
        "key_cache is torch.float8_e4m3fn",
    ),
    ("attention", STEP, step(page=8), "blocks have 8 positions, and the kernel takes multiples of 16 up to 1024"),
    ("attention", STEP, step(page=1040), "blocks have 1040 positions"),
    ("attention", STEP, step(size=80, page=1024), "takes multiples of 16 up to 512"),
    ("attention", STEP, step(size=80, window=3), "the kernel knows windows for 64 and 128 alone"),
    ("attention", STEP, step(size=40), "heads have 40 features, and the kernel takes multiples of 16 to 512"),
    ("attention", STEP, step(size=528), "heads have 528 features"),
    ("attention", STEP, step(heads=(130, 2)), "130 query heads, 65 to a key/value head"),
    ("attention", STEP, {"value": randn(3, 2, 32, dtype=BF16)}, "keys have 64 features and values 32"),
    ("attention", STEP, {"key_cache": randn(2, 16, 9, 64, dtype=BF16).transpose(0, 2)}, "key_cache is not contiguous"),
    ("attention", STEP, {"seq_lens": empty(4096, dtype=torch.int32)}, "there are 4096 sequences"),
    (
        "attention",
        PROMPT,
        attention_call(BF16, **LENGTHS["prefill"], size=256),
        "heads have 256 features, and for several",
    ),
    ("rotary_attention", TURNED, {"out_dtype": FP32}, "query and key go on as torch.float32"),
    ("rotary_attention", TURNED, {"softcap": 30.0}, "scores are capped"),
    ("rotary_attention", TURNED, {"normalize": True, "eps": 1e-6, "offset": 0.5}, "query: offset is 0.5"),
    ("rotary_attention", TURNED, {"compute_dtype": FP64}, "compute_dtype is torch.float64"),
]


@pytest.mark.parametrize(
    ("name", "call", "change", "text"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_call_beyond_what_is_documented_is_refused_with_the_reason(
    name: str, call: Call, change: Call, text: str
) -> None:
    op = BY_NAME[name]
    assert reason(op, call) is None
    assert text in str(reason(op, {**call, **change}))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_gates_by_the_error_function_may_stand_on_either_side(kind: str) -> None:
    assert reason(BY_NAME["gated_activation_fused"], {**GATE, "kind": kind, "gate_first": False}) is None


def test_halves_are_known_by_where_they_lie() -> None:
    op, whole = BY_NAME["gated_activation"], randn(4, 96, dtype=BF16)
    gate, up = whole.chunk(2, dim=-1)
    assert reason(op, {"gate": gate, "up": up, "kind": "silu"}) is None
    for other in (
        {"gate": up, "up": gate},
        {"gate": gate, "up": up.clone()},
        {"gate": whole[:, :47], "up": whole[:, 48:95]},
        {"gate": whole[:, :48:2], "up": whole[:, 48::2]},
        {"gate": whole[:2, :48], "up": randn(4, 96, dtype=BF16)[:2, 48:]},
    ):
        assert "no halves of one tensor" in str(reason(op, {**other, "kind": "silu"}))
    assert "without limit" in str(reason(op, {"gate": gate, "up": up, "kind": "silu", "limit": 1.0}))


# Rows in the order of memory.

FORMS: list[Callable[[], Tensor]] = [
    lambda: randn(2, 5, 3, 48).transpose(1, 2),
    lambda: randn(3, 4, 5, 48).permute(2, 0, 1, 3),
    lambda: randn(5, 144)[:, 48:96],
    lambda: randn(64, 6).t(),
    lambda: randn(6, 64, 3).transpose(1, 2),
    lambda: randn(1, 64).expand(5, 64),
    lambda: randn(3, 4, 128)[..., ::2],
    lambda: randn(2, 1, 4, 48).transpose(1, 2),
    lambda: randn(4, 6, 8, 128)[::2, ::3, ::2, :64],
    lambda: randn(64),
]


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_results_lie_as_torch_lays_them(form: int) -> None:
    x = FORMS[form]()
    rows = rows_of(x)
    made = rows.give(rows.take(x).contiguous() * 2.0)
    assert torch.equal(made, x * 2.0)
    assert [s for s, n in zip(made.stride(), x.shape, strict=True) if n > 1] == [
        s for s, n in zip((x * 2.0).stride(), x.shape, strict=True) if n > 1
    ]
    assert (made.data_ptr() != x.data_ptr()) and rows.take(x).shape[-1] == x.shape[-1]


def test_results_of_two_operands_lie_as_their_sum() -> None:
    for order in permutations(range(3)):
        back = [order.index(dim) for dim in range(3)]
        second = randn(*(torch.Size((2, 3, 5))[dim] for dim in order), 8).permute(*back, 3)
        for first in (randn(2, 3, 5, 8), randn(3, 2, 5, 8).transpose(0, 1)):
            rows = rows_of(first, second)
            made = rows.give(rows.take(first).contiguous() + rows.take(second))
            assert torch.equal(made, first + second) and made.stride() == (first + second).stride()


# Lengths of sequences as lists.


def test_rows_of_padding_are_one_more_sequence_with_keys_of_its_own() -> None:
    assert packed_ends(6, [0, 2, 3]) == [2, 3, 6] and packed_ends(3, [0, 2, 3]) == [2, 3, 3]
    assert packed_keys(6, 48, [9, 4], [0, 2, 3]) == [9, 4, 3]
    assert packed_keys(3, 48, [9, 4], [0, 2, 3]) == [9, 4, 1]
    assert packed_keys(99, 48, [9, 4], [0, 2, 3]) == [9, 4, 48]


def test_a_row_of_a_decode_step_is_a_sequence_s_own() -> None:
    assert decode_keys(3, [7, 5, 9], [0, 1, 2, 3]) == [7, 5, 9]
    assert decode_keys(4, [7, 5, 0], [0, 1, 2, 2]) == [7, 5, 1, 1]
    assert decode_keys(2, [0, 0], [0, 0, 0]) == [1, 1]
    for starts in ([0, 0, 1], [0, 2, 2]):
        with refused(UsageError, "a decode step", "other than one token"):
            decode_keys(2, [3, 4], starts)
