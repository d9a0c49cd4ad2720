"""core/common/passes/attention: every spelling becomes one op, as near to fp64 as the original was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.common.numerics import judge
from core.common.ops.attention.dense import DENSE_ATTENTION
from core.common.passes.attention.lift import LIFT_ATTENTION
from core.common.passes.context import PassContext
from core.common.passes.results import NearMiss
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.mechanisms import apply_pass
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.execution import run_graph
from core.verify.verify import checker
from tests.common.passes.graphs import to_aten

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
B, H, K, T, S, D = 2, 4, 2, 5, 11, 16
SCALE, CAP = 0.3, 2.5
Model = Callable[..., Any]

ALIBI = torch.linspace(-1, 0.5, B * H * S).view(B * H, 1, S)
BIAS = torch.linspace(-1, 1, H * T * S).view(1, H, T, S)
SINKS = torch.linspace(-1, 2, H)
SHOWN = torch.ones(T, S, dtype=torch.bool).tril(4)
GATE = torch.linspace(-0.2, 0.2, D * D).view(D, D)


def inputs_of(dtype: torch.dtype, *, num_kv_heads: int = K) -> dict[str, Tensor]:
    """Return query, key and value as projections leave them, and an additive mask (B, 1, T, S)."""
    generator = torch.Generator().manual_seed(7)

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(B, length, heads, D, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)

    mask = torch.zeros(B, 1, T, S, dtype=dtype).masked_fill(~SHOWN, torch.finfo(dtype).min)
    return {"q": draw(H, T), "k": draw(num_kv_heads, S), "v": draw(num_kv_heads, S), "m": mask}


def repeat(x: Tensor) -> Tensor:
    return x[:, :, None, :, :].expand(x.shape[0], K, H // K, x.shape[2], D).reshape(x.shape[0], H, x.shape[2], D)


def weigh(scores: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(F.dropout(weights, p=0.0, training=False), repeat(v))


def scored(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, repeat(k).transpose(2, 3))


def of_one_head(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    k, v = (x[:, :1].expand(B, H, S, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


def in_place(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = scored(q, k)
    scores *= SCALE
    scores += m
    return weigh(scores.masked_fill_(~SHOWN, -math.inf), v)


def with_alibi(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q, k, v = q.reshape(B * H, T, D), repeat(k).reshape(B * H, S, D), repeat(v).reshape(B * H, S, D)
    scores = torch.baddbmm(ALIBI.to(q.dtype), batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=SCALE)
    weights = F.softmax(scores.view(B, H, T, S) + m, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.bmm(weights.view(B * H, T, S), v).view(B, H, T, D)


def flat(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q, k, v = q.reshape(B * H, T, D) * SCALE, repeat(k).reshape(B * H, S, D), repeat(v).reshape(B * H, S, D)
    scores = torch.bmm(q, k.transpose(1, 2)) + m.expand(B, H, T, S).reshape(B * H, T, S)
    return torch.bmm(torch.softmax(scores, -1), v)


def without_heads(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return torch.softmax(torch.matmul(q[:, 0], k[:, 0].mT) * SCALE + m[:, 0], -1) @ v[:, 0]


def by_einsum(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = torch.einsum("bthd,bhsd->bhts", q.transpose(1, 2), repeat(k)) * SCALE + m
    return torch.einsum("bhts, bhsv -> bthv", torch.softmax(scores, -1), repeat(v))


def keys_stored_transposed(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return weigh(torch.matmul(q, repeat(k).permute(0, 1, 3, 2).contiguous().abs()) * SCALE + m, v)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, m: Tensor, *, shift: bool = True) -> Tensor:
    sinks = SINKS.to(q.dtype).reshape(1, -1, 1, 1).expand(B, -1, T, -1)
    scores = torch.cat([scored(q, k) * SCALE + m, sinks], dim=-1)
    if shift:
        scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(weights.to(v.dtype), repeat(v))


def with_sinks_by_token(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = torch.cat([scored(q, k) * SCALE + m, (q @ GATE.to(q.dtype)).mean(-1, keepdim=True)], dim=-1).float()
    return torch.matmul(F.softmax(scores, dim=-1)[..., :-1].to(v.dtype), repeat(v))


def with_a_gate_for_sinks(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = scored(q, k) * SCALE + m
    gate = torch.sigmoid((torch.logsumexp(scores, dim=-1) - SINKS.to(q.dtype).view(1, -1, 1)).float())
    return weigh(scores, v) * gate.unsqueeze(-1).to(q.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


# Per spelling: the model, and what must be read off. An operand that needs preparing keeps the op's `mask` a new node.
SPELLINGS: dict[str, tuple[Model, dict[str, Any]]] = {
    "one op": (lambda q, k, v, m: sdpa(q, repeat(k), repeat(v), attn_mask=m, scale=SCALE), {"scale": SCALE}),
    "one op, boolean mask": (
        lambda q, k, v, m: sdpa(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), attn_mask=m == 0),
        {"scale": 0.25},
    ),
    "one op, grouped": (lambda q, k, v, m: sdpa(q, k, v, attn_mask=m, enable_gqa=True), {"scale": 0.25}),
    "one op, causal": (lambda q, k, v, m: sdpa(q, repeat(k), repeat(v), is_causal=True), {"causal": True}),
    "one op, one head": (of_one_head, {"scale": 0.25}),
    "one op, no heads": (lambda q, k, v, m: sdpa(q[:, 0], k[:, 0], v[:, 0], attn_mask=m[:, 0]), {"scale": 0.25}),
    "written out": (lambda q, k, v, m: weigh(scored(q, k) * SCALE + m, v), {"scale": SCALE}),
    "divided": (lambda q, k, v, m: weigh(m + scored(q, k) / 4.0, v), {"scale": 0.25}),
    "query scaled": (lambda q, k, v, m: weigh(scored(q * SCALE, k) + m, v), {"scale": SCALE}),
    "wide": (
        lambda q, k, v, m: torch.softmax(scored(q.float(), k.float()) * SCALE + m, -1).to(v.dtype) @ repeat(v),
        {"scale": SCALE},
    ),
    "in place": (in_place, {"scale": SCALE}),
    "floored": (
        lambda q, k, v, m: weigh(torch.max(scored(q, k) * SCALE + m, torch.tensor(torch.finfo(q.dtype).min)), v),
        {"scale": SCALE},
    ),
    "alibi": (with_alibi, {"scale": SCALE}),
    "flat": (flat, {"scale": SCALE}),
    "without heads": (without_heads, {"scale": SCALE}),
    "einsum": (by_einsum, {"scale": SCALE}),
    "keys stored transposed": (keys_stored_transposed, {"scale": SCALE}),
    "masked_fill": (
        lambda q, k, v, m: weigh((scored(q, k) * SCALE).masked_fill(~SHOWN, -math.inf), v),
        {"scale": SCALE},
    ),
    "where": (
        lambda q, k, v, m: weigh(torch.where(SHOWN, scored(q, k) * SCALE, torch.finfo(q.dtype).min), v),
        {"scale": SCALE},
    ),
    "where and mask": (
        lambda q, k, v, m: weigh(torch.where(SHOWN, scored(q, k), torch.tensor(-math.inf, dtype=q.dtype)) + m, v),
        {"scale": 1.0},
    ),
    "bias and mask": (lambda q, k, v, m: weigh(scored(q, k) * SCALE + BIAS.to(q.dtype) + m, v), {"scale": SCALE}),
    "scaled after the mask": (lambda q, k, v, m: weigh((scored(q, k) + BIAS.to(q.dtype)) / 4.0, v), {"scale": 0.25}),
    "soft-cap": (
        lambda q, k, v, m: weigh(torch.tanh(scored(q, k) * SCALE / CAP) * CAP + m, v),
        {"softcap": CAP, "scale": SCALE},
    ),
    "sinks": (with_sinks, {"scale": SCALE}),
    "sinks, not shifted": (lambda q, k, v, m: with_sinks(q, k, v, m, shift=False), {"scale": SCALE}),
    "sinks by token": (with_sinks_by_token, {"scale": SCALE}),
    "sinks as a gate": (with_a_gate_for_sinks, {"scale": SCALE}),
}


def lift(model: Model, inputs: dict[str, Tensor]) -> tuple[TracedGraph, PassReport]:
    """Trace, lift, and judge every output and site in full."""
    graph = trace(lambda q, k, v, m: model(q, k, v, m), inputs)
    (report,) = PassManager((LIFT_ATTENTION,), strict=True).run(
        graph.module, check=checker([graph.values(inputs)], "full")
    )
    return graph, report


def ops(graph: TracedGraph) -> list[Any]:
    return [node for node in graph.module.graph.nodes if node.target is DENSE_ATTENTION.overload]


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_lifted_and_right(spelling: str, dtype: torch.dtype) -> None:
    model, options = SPELLINGS[spelling]
    graph, report = lift(model, inputs_of(dtype))
    assert report.matched == 1 and not report.near_misses
    (node,) = ops(graph)
    read = {name: node.kwargs[name] for name in options}
    assert read == pytest.approx(options)
    left = {getattr(n.target, "__name__", n.target) for n in graph.module.graph.nodes}
    assert not left & {"softmax", "scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum"} - (
        {"matmul"} if spelling == "sinks by token" else set()
    )


@pytest.mark.cases(3)
@pytest.mark.parametrize("spelling", ["one op", "one op, boolean mask", "one op, one head", "written out", "soft-cap"])
def test_repeated_keys_and_values_are_read_where_they_come_from(spelling: str) -> None:
    graph, _ = lift(SPELLINGS[spelling][0], inputs_of(torch.bfloat16))
    (node,) = ops(graph)
    assert [operand.meta["example_value"].shape[1] for operand in node.args[1:]] == (
        [1, 1] if spelling == "one op, one head" else [K, K]
    )
    assert len(graph.module.graph.find_nodes(op="call_method", target="expand")) == 0


@pytest.mark.cases(2)
@pytest.mark.parametrize("spelling", ["one op", "written out", "soft-cap", "sinks", "divided"])
def test_without_an_implementation_the_original_comes_back_bit_by_bit(spelling: str) -> None:
    inputs = inputs_of(torch.bfloat16)
    graph, _ = lift(SPELLINGS[spelling][0], inputs)
    (choice,) = choose_implementations(graph.module, ())
    assert choice.implementation == "original"
    assert torch.equal(graph.module(*graph.values(inputs))[0], SPELLINGS[spelling][0](**inputs))


@pytest.mark.cases(2)
@pytest.mark.parametrize("spelling", ["one op", "written out", "bias and mask"])
def test_the_number_of_sequences_may_be_symbolic(spelling: str) -> None:
    inputs = inputs_of(torch.float32)
    model = SPELLINGS[spelling][0]
    graph = trace(lambda q, k, v, m: model(q, k, v, m), inputs, dynamic=dict.fromkeys(inputs, (0,)))
    (report,) = PassManager((LIFT_ATTENTION,), strict=True).run(graph.module)
    assert report.matched == 1 and not report.near_misses


NEAR_MISSES: dict[str, tuple[Model, str]] = {
    "dropout": (lambda q, k, v, m: sdpa(q, repeat(k), repeat(v), dropout_p=0.5), "drops out 0.5"),
    "a temperature by head": (
        lambda q, k, v, m: weigh(scored(q, k) * SINKS.to(q.dtype).view(-1, 1, 1) + m, v),
        "no argument of the op stands for mul",
    ),
    "weights used twice": (
        lambda q, k, v, m: (lambda w: (w @ repeat(v), w.sum()))(torch.softmax(scored(q, k) + m, -1)),
        "as well",
    ),
    "scores used twice": (
        lambda q, k, v, m: (lambda s: weigh(s, v) + s.sum())(scored(q, k) * SCALE + m),
        "as well",
    ),
    "a mask before the cap": (
        lambda q, k, v, m: weigh(torch.tanh(scored(q, k) + m) * CAP, v),
        "before the soft-cap",
    ),
    "hidden by a small number": (
        lambda q, k, v, m: weigh(scored(q, k).masked_fill(~SHOWN, -1e4), v),
        "only where others are shown",
    ),
    "sinks that stay": (
        lambda q, k, v, m: (
            torch.softmax(torch.cat([scored(q, k), m[..., :1].expand(B, H, T, 1)], -1), -1)
            @ F.pad(repeat(v), (0, 0, 0, 1))
        ),
        "but not both",
    ),
    "another function of the scores": (
        lambda q, k, v, m: weigh(torch.relu(scored(q, k)) + m, v),
        "no argument of the op stands for relu",
    ),
    "floored too high": (
        lambda q, k, v, m: weigh(torch.clamp(scored(q, k) + m, min=-5.0), v),
        "no argument of the op stands for clamp",
    ),
    "boolean mask added": (lambda q, k, v, m: weigh(scored(q, k) + SHOWN, v), "no floating-point tensor"),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_left_alone_with_the_reason(case: str) -> None:
    model, reason = NEAR_MISSES[case]
    inputs = inputs_of(torch.float32)
    graph = trace(lambda q, k, v, m: model(q, k, v, m), inputs)
    (report,) = PassManager((LIFT_ATTENTION,), strict=True).run(graph.module)
    assert report.matched == 0 and not ops(graph)
    (miss,) = report.near_misses
    assert isinstance(miss, NearMiss) and reason in miss.reason


def linear_attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return torch.softmax(q, -1) @ (torch.softmax(repeat(k), 2).transpose(2, 3) @ repeat(v))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "model",
    [
        linear_attention,
        lambda q, k, v, m: torch.topk(torch.softmax(F.linear(q, GATE), -1), 2),
        lambda q, k, v, m: torch.softmax(F.linear(q, GATE), -1) @ GATE,
        lambda q, k, v, m: torch.softmax(scored(q, k), 1) @ repeat(v),
        lambda q, k, v, m: scored(q, k) @ repeat(v),
    ],
    ids=["linear attention", "router", "mixture", "softmax over heads", "no softmax"],
)
def test_what_is_no_attention_is_none(model: Model) -> None:
    graph = trace(lambda q, k, v, m: model(q, k, v, m), inputs_of(torch.float32))
    (report,) = PassManager((LIFT_ATTENTION,), strict=True).run(graph.module)
    assert report.matched == 0 and not report.near_misses


def test_heads_repeated_in_another_order_stay_repeated() -> None:
    inputs = inputs_of(torch.float32)
    graph, report = lift(lambda q, k, v, m: sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), attn_mask=m), inputs)
    (node,) = ops(graph)
    assert report.matched == 1 and node.args[1].target == node.args[2].target == "repeat"


@pytest.mark.cases(2)
@pytest.mark.parametrize("spelling", ["written out", "flat", "soft-cap", "alibi", "masked_fill"])
def test_what_is_written_out_is_lifted_from_aten_graphs_too(spelling: str) -> None:
    inputs, model = inputs_of(torch.float32), SPELLINGS[spelling][0]
    module = to_aten(lambda q, k, v, m: model(q, k, v, m), *inputs.values())
    generator = torch.Generator().manual_seed(3)
    values = []
    for node in module.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        drawn = torch.randn(fake.shape, generator=generator, dtype=torch.float64)
        values.append(drawn > -1 if fake.dtype == torch.bool else drawn.to(fake.dtype))
    (eager,), (exact,) = (run_graph(module, values, fp64=fp64).outputs for fp64 in (False, True))
    result = apply_pass(LIFT_ATTENTION, PassContext(module=module, stage="aten"))
    module.graph.lint()
    module.recompile()
    (node,) = module.graph.find_nodes(op="call_function", target=DENSE_ATTENTION.overload)
    assert result.matched == 1 and node.kwargs["scale"] == pytest.approx(SCALE)
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    verdict = judge(run_graph(module, values).outputs[0], eager, exact)
    assert verdict.passed, verdict
