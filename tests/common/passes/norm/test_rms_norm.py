"""core/common/passes/norm/rms_norm.py: every spelling and rounding of RMSNorm is one op, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.common.ops.norm.norms import RMS_NORM
from core.common.passes.context import PassContext
from core.common.passes.norm.rms_norm import LIFT_RMS_NORM
from core.compilation.rewrite.mechanisms import apply_pass
from core.compilation.trace.tracing import trace
from tests.common.passes.graphs import to_aten
from tests.common.passes.lifting import BF16, DTYPES, F32, Lifted, draw, lifted, lifted_graph

D = 24


def lift(function: Callable[..., Any], **inputs: Tensor) -> Lifted:
    return lifted(function, LIFT_RMS_NORM, **inputs)


def the_call(result: Lifted) -> dict[str, Any]:
    (node,) = result.calls(RMS_NORM.overload)
    return dict(RMS_NORM.bind(node.args, node.kwargs).args)


def norm(x: Tensor, eps: float = 1e-5, dim: int = -1) -> Tensor:
    wide = x.to(F32)
    return wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + eps)


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weight after the cast": lambda x, w: w * norm(x).to(x.dtype),
    "weight before the cast": lambda x, w: (w * norm(x)).to(x.dtype),
    "weight cast first": lambda x, w: (norm(x) * w.float()).type_as(x),
    "one plus weight": lambda x, w: (norm(x) * (1.0 + w.float())).type_as(x),
    "weight plus one": lambda x, w: ((w.float() + 1) * norm(x)).to(x.dtype),
    "offset in the weight's dtype": lambda x, w: (norm(x) * (w + 1.0).float()).to(x.dtype),
    "no weight": lambda x, w: norm(x).to(x.dtype),
    "no weight, wide result": lambda x, w: norm(x),
    "wide result": lambda x, w: norm(x) * w.float(),
    "product": lambda x, w: (lambda a: a * torch.rsqrt((a * a).mean(-1, keepdim=True) + 1e-5) * w.float())(x.float()),
    "negative power": lambda x, w: (x.float() * (torch.square(x.float()).mean((-1,), True) + 1e-5).pow(-0.5)).to(
        x.dtype
    ),
    "root cast to its own dtype": lambda x, w: x.float() * torch.rsqrt(x.float().pow(2).mean(-1, True) + 1e-5).to(F32),
    "mean without its dimension": lambda x, w: x * torch.rsqrt(x.float().pow(2).mean(-1).unsqueeze(-1) + 1e-5),
    "no eps": lambda x, w: x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True)),
    "all in x's dtype": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "single op": lambda x, w: torch.rms_norm(x, (D,), w, 3e-4),
    "single op without eps": lambda x, w: torch.rms_norm(x * 1e-3, (D,), w),
    "single op without weight": lambda x, w: nn.functional.rms_norm(x, (D,), eps=1e-6),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_lifted_and_keeps_every_bit(spelling: str, dtype: torch.dtype) -> None:
    result = lift(SPELLINGS[spelling], x=draw(3, 7, D, dtype=dtype), w=draw(D, dtype=dtype, scale=0.4, shift=1.0))
    assert result.reports["lift_rms_norm"].matched == result.count(RMS_NORM.overload) == 1
    assert result.is_equal


def test_two_nodes_for_the_inverse_root_are_lifted_and_right() -> None:
    x = draw(5, D)
    result = lift(lambda x: x * (1 / torch.sqrt(1e-5 + x.pow(2).mean(-1, keepdim=True))), x=x)
    assert result.count(RMS_NORM.overload) == 1
    torch.testing.assert_close(result.after, result.before, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("order", [lambda w, n: w * n, lambda w, n: n * w], ids=["weight first", "weight last"])
def test_a_wide_weight_on_narrow_rows_gives_a_wide_result(order: Callable[[Tensor, Tensor], Tensor]) -> None:
    result = lift(lambda x, w: order(w, norm(x).to(x.dtype)), x=draw(5, D, dtype=BF16), w=draw(D, shift=1.0))
    call = the_call(result)
    assert (call["normed_dtype"], call["out_dtype"]) == (BF16, F32)
    assert result.is_equal


def test_a_wider_cast_after_the_norm_is_not_part_of_it() -> None:
    result = lift(lambda x, w: (w * norm(x).to(BF16)).float(), x=draw(5, D, dtype=BF16), w=draw(D, dtype=BF16))
    assert the_call(result)["out_dtype"] == BF16
    assert result.is_equal


def test_eps_is_read_as_a_value_and_each_norm_keeps_its_own() -> None:
    result = lift(lambda x: norm(norm(norm(x, 1e-5) * 3, 1e-6) + 1, 3e-4), x=draw(5, D, scale=0.02))
    assert [node.args[2] for node in result.calls(RMS_NORM.overload)] == [1e-5, 1e-6, 3e-4]
    assert result.is_equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gated_norm_over_groups_is_lifted_without_its_weight(dtype: torch.dtype) -> None:
    def model(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        wide = x.float() * nn.functional.silu(gate.float())
        groups = wide.view(*wide.shape[:-1], 3, 8)
        return w * norm(groups).view(*wide.shape).to(x.dtype)

    inputs = {"x": draw(2, 5, D, dtype=dtype), "gate": draw(2, 5, D, dtype=dtype, seed=8), "w": draw(D, dtype=dtype)}
    result = lift(model, **inputs)
    assert the_call(result)["weight"] is None
    assert result.is_equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_of_a_norm_through_idle_casts_is_two_norms(dtype: torch.dtype) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        first = (norm(x) * w.float()).to(x.dtype)
        return first + (norm(first) * w.float()).to(x.dtype)

    result = lift(model, x=draw(5, D, dtype=dtype), w=draw(D, dtype=dtype))
    assert result.count(RMS_NORM.overload) == 2
    assert result.is_equal


def test_the_dtype_may_be_read_off_another_tensor() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        rows = (x * 2).type_as(y)
        return norm(rows).type_as(rows)

    result = lift(model, x=draw(5, D), y=draw(2))
    assert result.count(RMS_NORM.overload) == 1
    assert result.is_equal


def test_heads_and_odd_numbers_of_tokens() -> None:
    for num_tokens in (1, 3, 17):
        heads = lambda x, w: w * norm(x.view(2, -1, 3, 8).transpose(1, 2))  # noqa: E731
        result = lift(heads, x=draw(2, num_tokens, D), w=draw(8, shift=1.0))
        assert result.count(RMS_NORM.overload) == 1
        assert result.is_equal


def test_the_token_dimension_may_be_symbolic() -> None:
    x, w = draw(2, 7, D), draw(D)
    graph = trace(lambda x, w: w * norm(x).to(x.dtype), {"x": x, "w": w}, dynamic={"x": {1: (2, 64)}})
    result = lifted_graph(graph, {"x": x, "w": w}, LIFT_RMS_NORM)
    assert result.count(RMS_NORM.overload) == 1
    assert result.is_equal


@pytest.mark.cases(3)
@pytest.mark.parametrize("spelling", ["weight after the cast", "one plus weight", "weight cast first", "single op"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_matcher_reads_aten_graphs(spelling: str, dtype: torch.dtype) -> None:
    x, w = draw(5, D, dtype=dtype), draw(D, dtype=dtype)
    graph = to_aten(lambda x, w: SPELLINGS[spelling](x, w), x, w)
    control = graph(x, w)
    assert apply_pass(LIFT_RMS_NORM, PassContext(module=graph, stage="aten")).matched == 1
    graph.recompile()
    assert torch.equal(graph(x, w)[0], control[0])


def root(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    factor = root(x)
    return x * factor, factor


NEAR_MISSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "the root is used twice": (scaled, "is used otherwise than in one product"),
    "the root scales something else": (lambda x: (x @ x.T) * root(x), "not the normalised"),
    "another dimension": (lambda x: norm(x, dim=0), "no mean over the last dimension"),
    "the mean in another dtype": (
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float64) + 1e-5),
        "in the dtype of",
    ),
    "eps as a bound": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True).clamp(min=1e-5)), "takes more of"),
    "rounded squares": (
        lambda x: x * torch.rsqrt(x.pow(2).to(BF16).float().mean(-1, True) + 1e-5),
        "casts the squares",
    ),
    "divided by the root": (lambda x: x / torch.sqrt(x.pow(2).mean(-1, True) + 1e-5), "rounds otherwise"),
    "scaled to unit length": (lambda x: nn.functional.normalize(x, dim=-1) * D**0.5, "divides by the length"),
    "over two dimensions": (lambda x: torch.rms_norm(x, x.shape, eps=1e-5), "over 2 dimensions"),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_left_alone_with_the_reason(case: str) -> None:
    function, reason = NEAR_MISSES[case]
    result = lift(function, x=draw(D, D))
    assert result.reports["lift_rms_norm"].matched == result.count(RMS_NORM.overload) == 0
    assert reason in result.reasons("lift_rms_norm")
    assert result.is_equal


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x - x.mean(-1, True)) * torch.rsqrt((x - x.mean(-1, True)).pow(2).mean(-1, True) + 1e-5),
        lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
        lambda x: x * torch.rsqrt(x.abs() + 1e-6) / 3,
    ],
    ids=["layer norm", "unit length", "any root"],
)
def test_what_plainly_is_something_else_makes_no_noise(function: Callable[[Tensor], Tensor]) -> None:
    report = lift(function, x=draw(5, D)).reports["lift_rms_norm"]
    assert (report.matched, report.near_misses) == (0, ())


def test_rounding_the_root_is_no_form_of_the_op() -> None:
    model = lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, True) + 1e-5).to(x.dtype)  # noqa: E731
    result = lift(model, x=draw(5, D, dtype=BF16))
    assert result.count(RMS_NORM.overload) == 0
    assert result.reasons("lift_rms_norm")


def test_a_write_between_input_and_norm_is_a_near_miss() -> None:
    buffer = draw(5, D)

    def model(x: Tensor) -> Tensor:
        factor = root(buffer)
        buffer.add_(x)
        return buffer * factor

    result = lift(model, x=draw(5, D))
    assert result.reports["lift_rms_norm"].matched == 0
    assert "written" in result.reasons("lift_rms_norm")
