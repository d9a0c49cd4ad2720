"""core/common/passes/mlp/gated_activation.py: every way to write a gated MLP's gate is one op, and no bit changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.ops.mlp.activation import ACTIVATIONS, GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.passes import view
from core.common.passes.mlp.gated_activation import LIFT_GATED_ACTIVATION
from tests.common.passes.lifting import BF16, DTYPES, F32, Lifted, draw, lifted, lifted_graph, traced_model
from tests.marks import slow_except

HIDDEN, SIZE = 12, 16


def lift(function: Callable[..., Any], **inputs: Tensor) -> Lifted:
    return lifted(function, LIFT_GATED_ACTIVATION, **inputs)


def inputs(dtype: torch.dtype, num_tokens: int = 5) -> dict[str, Tensor]:
    """Return hidden states, and the weights of a gate, an up and a fused projection."""
    return {
        "x": draw(2, num_tokens, HIDDEN, dtype=dtype, scale=3.0),
        "g": draw(SIZE, HIDDEN, dtype=dtype),
        "u": draw(SIZE, HIDDEN, dtype=dtype, seed=8),
        "gu": draw(2 * SIZE, HIDDEN, dtype=dtype),
    }


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ACTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "silu": ("silu", functional.silu),
    "gelu": ("gelu", functional.gelu),
    "gelu by tanh": ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    "gelu written out": ("gelu_new", gelu_new),
    "quick gelu": ("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    "quick gelu, swapped": ("quick_gelu", lambda x: torch.sigmoid(x * 1.702) * x),
    "relu": ("relu", functional.relu),
    "squared relu": ("relu2", lambda x: torch.square(functional.relu(x))),
    "relu to the second": ("relu2", lambda x: torch.relu(x).pow(2)),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "cast to its own dtype": ("silu", lambda x: functional.silu(x).to(x.dtype)),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_every_activation_of_two_projections_is_lifted(act: str, dtype: torch.dtype) -> None:
    kind, function = ACTS[act]

    def model(x: Tensor, g: Tensor, u: Tensor, gu: Tensor) -> Tensor:
        return functional.linear(x, u) * function(functional.linear(x, g))

    result = lift(model, **inputs(dtype))
    (call,) = result.calls(GATED_ACTIVATION.overload)
    assert result.reports["lift_gated_activation"].matched == 1
    assert call.kwargs["kind"] == kind
    assert result.is_equal


def test_every_kind_of_the_op_is_lifted_from_some_spelling() -> None:
    assert {kind for kind, _ in ACTS.values()} == set(ACTIVATIONS)


def by_view(y: Tensor) -> tuple[Tensor, Tensor]:
    rows = y.view(*y.shape[:-1], 2, -1)
    return rows[..., 0, :], rows[..., 1, :]


def unbound(y: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = y.reshape(*y.shape[:-1], SIZE, 2).unbind(-1)
    return gate, up


# Each gives (gate, up); the flags are gate_first and interleaved.
HALVES: dict[str, tuple[Callable[[Tensor], Any], bool, bool]] = {
    "chunk": (lambda y: y.chunk(2, dim=-1), True, False),
    "chunk, second is the gate": (lambda y: y.chunk(2, -1)[::-1], False, False),
    "split": (lambda y: y.split(SIZE, dim=-1), True, False),
    "split by sizes": (lambda y: torch.split(y, [SIZE, SIZE], dim=2), True, False),
    "slices": (lambda y: (y[..., :SIZE], y[..., SIZE:]), True, False),
    "slices of all dimensions": (lambda y: (y[:, :, SIZE:], y[:, :, :SIZE]), False, False),
    "narrow": (lambda y: (y.narrow(-1, 0, SIZE), y.narrow(-1, SIZE, SIZE)), True, False),
    "view": (by_view, True, False),
    "every second": (lambda y: (y[..., ::2], y[..., 1::2]), True, True),
    "every second, swapped": (lambda y: (y[..., 1::2], y[..., ::2]), False, True),
    "unbind": (unbound, True, True),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", HALVES)
def test_halves_of_one_projection_are_one_operand(spelling: str, dtype: torch.dtype) -> None:
    take, gate_first, interleaved = HALVES[spelling]

    def model(x: Tensor, gu: Tensor) -> Tensor:
        gate, up = take(functional.linear(x, gu))
        return functional.silu(gate) * up

    given = inputs(dtype)
    result = lift(model, x=given["x"], gu=given["gu"])
    (call,) = result.calls(GATED_ACTIVATION_FUSED.overload)
    assert (call.kwargs["gate_first"], call.kwargs["interleaved"]) == (gate_first, interleaved)
    assert result.is_equal


OTHER_PARTS: dict[str, Callable[[Tensor], Any]] = {
    "two of three": lambda y: y.split([SIZE, SIZE // 2, SIZE // 2], dim=-1)[1:],
    "of another dimension": lambda y: y.transpose(1, 2).chunk(2, dim=1),
    "overlapping": lambda y: (y[..., :SIZE], y[..., SIZE - 2 : 2 * SIZE - 2]),
    "of two tensors": lambda y: (y[..., :SIZE], (y * 2)[..., SIZE:]),
}


@pytest.mark.parametrize("spelling", OTHER_PARTS)
def test_other_parts_of_one_tensor_stay_two_operands(spelling: str) -> None:
    def model(y: Tensor) -> Tensor:
        gate, up = OTHER_PARTS[spelling](y)
        return functional.silu(gate) * up

    result = lift(model, y=draw(2, 5, 2 * SIZE))
    assert (result.count(GATED_ACTIVATION.overload), result.count(GATED_ACTIVATION_FUSED.overload)) == (1, 0)
    assert result.is_equal


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limits", [(7.0, 7.0), (2.5, 2.5), (7.0, 5.0)], ids=str)
def test_bounds_and_an_offset_are_part_of_the_op_where_they_are_its_own(
    limits: tuple[float, float], dtype: torch.dtype
) -> None:
    def model(y: Tensor) -> Tensor:
        gate, up = y[..., ::2].clamp(min=None, max=limits[0]), y[..., 1::2].clamp(min=-limits[1], max=limits[1])
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    result = lift(model, y=draw(5, 2 * SIZE, dtype=dtype, scale=9.0))
    calls = [*result.calls(GATED_ACTIVATION_FUSED.overload), *result.calls(GATED_ACTIVATION.overload)]
    assert [call.kwargs["up_offset"] for call in calls] == [1.0]
    assert calls[0].kwargs["limit"] == (limits[0] if limits[0] == limits[1] else 0.0)
    assert result.is_equal


def test_gates_after_batched_expert_products_are_lifted() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        gate, up = torch.bmm(x, w).chunk(2, dim=-1)
        return functional.relu(gate) * up

    result = lift(model, x=draw(3, 5, HIDDEN), w=draw(3, HIDDEN, 2 * SIZE))
    assert result.count(GATED_ACTIVATION_FUSED.overload) == 1
    assert result.is_equal


def attention_of(q: Tensor, k: Tensor) -> Tensor:
    """Return what two heads of attention give, (2, tokens, SIZE), in the order of a model's rows."""
    query, key = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in (q, k))
    return functional.scaled_dot_product_attention(query, key, key).transpose(1, 2).reshape(q.shape)


def half_of_each_head(x: Tensor, w: Tensor) -> Tensor:
    return functional.linear(x, w).view(*x.shape[:-1], 2, -1).chunk(2, dim=-1)[1].reshape(*x.shape[:-1], -1)


OUTPUT_GATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a half of each head's": lambda y, x, gu: y * torch.sigmoid(half_of_each_head(x, gu)),
    "of its own projection": lambda y, x, gu: functional.linear(x, gu[:SIZE]).sigmoid() * y,
    "of a projection with a bias": lambda y, x, gu: functional.sigmoid(torch.matmul(x, gu[:SIZE].T) + gu[0, 0]) * y,
    "of what is in another dtype": lambda y, x, gu: y.double() * torch.sigmoid(functional.linear(x, gu[:SIZE])),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", OUTPUT_GATES)
def test_the_gate_of_what_attention_gives_is_lifted(spelling: str, dtype: torch.dtype) -> None:
    def model(x: Tensor, g: Tensor, u: Tensor, gu: Tensor) -> Tensor:
        y = attention_of(functional.linear(x, g), functional.linear(x, u))
        return OUTPUT_GATES[spelling](y, x, gu)

    result = lift(model, **inputs(dtype))
    (call,) = result.calls(GATED_ACTIVATION.overload)
    report = result.reports["lift_gated_activation"]
    assert (report.matched, report.near_misses) == (1, ())
    assert call.kwargs["kind"] == "sigmoid"
    assert view.kind(call.args[1]) in ("reshape", "cast")
    assert result.is_equal


def test_odd_and_single_token_counts() -> None:
    for num_tokens in (1, 7):
        given = inputs(BF16, num_tokens)
        result = lift(lambda x, g, u, gu: functional.silu(x @ g.T) * (x @ u.T), **given)
        assert result.count(GATED_ACTIVATION.overload) == 1
        assert result.is_equal


def in_place(x: Tensor, y: Tensor) -> Tensor:
    gated = functional.silu(x)
    gated *= y
    return gated


NEAR_MISSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "broadcast": (lambda x, y: functional.silu(x) * y.sum(-1, keepdim=True), "differ in shape"),
    "used twice": (lambda x, y: (lambda a: a * y + a)(functional.silu(x)), "used a second time"),
    "its inside used twice": (lambda x, y: (lambda s: x * s * y + s)(torch.sigmoid(1.702 * x)), "used a second time"),
    "silu written out": (lambda x, y: x * torch.sigmoid(x) * y, "rounds once more"),
    "another factor": (lambda x, y: x * torch.sigmoid(1.5 * x) * y, "quick_gelu's is 1.702"),
    "gelu in another form": (
        lambda x, y: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))) * y,
        "another form",
    ),
    "bounded after": (lambda x, y: functional.silu(x).clamp(max=2.0) * y, "between the activation and the product"),
    "cast after": (lambda x, y: functional.silu(x.double()).float() * y, "between the activation and the product"),
    "in place": (in_place, "in place"),
    "a sigmoid used twice": (lambda x, y: (lambda s: s * y + s)(torch.sigmoid(x @ (x.T @ y))), "used a second time"),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_left_alone_with_the_reason(case: str) -> None:
    function, reason = NEAR_MISSES[case]
    result = lift(function, x=draw(5, SIZE), y=draw(5, SIZE, seed=9))
    assert result.reports["lift_gated_activation"].matched == 0
    assert result.count(GATED_ACTIVATION.overload) == result.count(GATED_ACTIVATION_FUSED.overload) == 0
    assert reason in result.reasons("lift_gated_activation")
    assert result.is_equal


NO_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sigmoid of no projection": lambda x, y: torch.softmax(y, -1) * torch.sigmoid(x),
    "projections of two tensors": lambda x, y: torch.relu(x @ x.T) * (y @ y.T),
    "a gate for each row": lambda x, y: torch.sigmoid(x @ x[0, :, None]) * y,
    "a mask": lambda x, y: torch.sigmoid(x @ x.T) * (y @ y.T > 0),
    "a silu of a projection": lambda x, y: (lambda p: torch.sigmoid(p) * p)(x @ y.T),
    "a quick gelu of a projection": lambda x, y: (lambda p: p * torch.sigmoid(1.702 * p))(x @ y.T),
    "a router's score": lambda x, y: torch.sigmoid(x[:, :1]) * y,
    "an activation alone": lambda x, y: x * torch.sigmoid(1.702 * x) + y,
    "relu of anything": lambda x, y: torch.relu(x.abs()) * y,
    "two numbers": lambda x, y: x * 0.5 * 2,
}


@pytest.mark.parametrize("case", NO_GATES)
def test_what_plainly_is_no_gate_makes_no_noise(case: str) -> None:
    result = lift(NO_GATES[case], x=draw(5, SIZE), y=draw(5, SIZE, seed=9))
    report = result.reports["lift_gated_activation"]
    assert (report.matched, report.near_misses) == (0, ())


OUTPUT_GATED = {"qwen3_next": 1, "afmoe": 2}
"""How many layers of a tiny model scale what attention gives by the sigmoid of a projection."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), slow_except(product(OUTPUT_GATED, DTYPES), ("qwen3_next", BF16)), ids=str)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # transformers'
def test_gates_of_models_attention_are_lifted_and_no_bit_changes(name: str, dtype: torch.dtype) -> None:
    graph, given, _ = traced_model(name, dtype)
    result = lifted_graph(graph, given, LIFT_GATED_ACTIVATION)
    kinds = [call.kwargs["kind"] for call in result.calls(GATED_ACTIVATION.overload)]
    assert kinds.count("sigmoid") == OUTPUT_GATED[name]
    assert result.is_equal


MODELS = ("llama", "gemma3_text", "phi3", "moshi")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), slow_except(product(MODELS, DTYPES), ("phi3", F32), ("gemma3_text", BF16)), ids=str
)
def test_a_model_is_lifted_whole_and_no_bit_changes(name: str, dtype: torch.dtype) -> None:
    graph, given, _ = traced_model(name, dtype)
    result = lifted_graph(graph, given, LIFT_GATED_ACTIVATION)
    target = GATED_ACTIVATION_FUSED if name in ("phi3", "moshi") else GATED_ACTIVATION
    assert result.count(target.overload) == result.reports["lift_gated_activation"].matched == 2
    assert result.is_equal
