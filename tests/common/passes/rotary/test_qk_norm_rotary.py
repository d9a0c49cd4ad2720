"""core/common/passes/rotary/qk_norm.py: norms of query and key go into one op with their rotation, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.rotary.rotation import QK_NORM_ROTARY, ROTARY
from core.common.passes.norm.rms_norm import LIFT_RMS_NORM
from core.common.passes.rotary.lift import LIFT_ROTARY
from core.common.passes.rotary.qk_norm import FUSE_QK_NORM_ROTARY
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import to_text
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace

F32, BF16 = torch.float32, torch.bfloat16
SIZE = 8
Model = Callable[..., tuple[Tensor, ...]]


def inputs_of(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return projected query (2, 5, 4 * 8) and key (2, 5, 2 * 8), norm weights (8,), cos and sin (2, 5, 8)."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    angles = torch.arange(2)[:, None, None] * 7.0 + torch.arange(5.0)[:, None] + torch.linspace(0.1, 1.4, SIZE)
    weights = {"query_weight": draw(SIZE), "key_weight": draw(SIZE)}
    tables = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    return {"query": draw(2, 5, 4 * SIZE), "key": draw(2, 5, 2 * SIZE), **weights, **tables}


def root(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def qwen(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.to(F32)
    return weight * (wide * root(wide, eps)).to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float = 3e-4) -> Tensor:
    wide = x.float()
    return (wide * root(wide, eps) * (1.0 + weight.float())).type_as(x)


def bare(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.float()
    return (wide * root(wide, eps)).type_as(x)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, middle = x[..., :width], width // 2
    crossed = torch.cat((-turned[..., middle:], turned[..., :middle]), dim=-1)
    rotated = turned * cos + crossed * sin
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


def model_of(
    query_norm: Callable[..., Tensor],
    key_norm: Callable[..., Tensor] | None = None,
    *,
    width: int = SIZE,
    heads_first: bool = False,
) -> Model:
    """Return a model that norms query and key head by head, before or after it puts the heads first, and turns them."""
    key_norm = key_norm or query_norm

    def one(x: Tensor, norm: Callable[[Tensor], Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        x = x.view(2, -1, x.shape[-1] // SIZE, SIZE)
        x = norm(x.transpose(1, 2)) if heads_first else norm(x).transpose(1, 2)
        return turn(x, cos, sin)

    def model(
        query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos[..., :width].unsqueeze(1), sin[..., :width].unsqueeze(1)
        turned = one(query, lambda x: query_norm(x, query_weight), cos, sin)
        return turned, one(key, lambda x: key_norm(x, key_weight), cos, sin)

    return model


def run(graph: TracedGraph, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(graph.module(*graph.values(dict(inputs))))


def fused(model: Model, dtype: torch.dtype, dynamic: Any = None) -> tuple[TracedGraph, PassReport]:
    """Fuse a model, and check that neither fused nor unfused, nor with the old nodes back, any bit has changed."""
    inputs = inputs_of(dtype)
    graph = trace(lambda **given: model(**given), inputs, dynamic=dynamic)
    control = run(graph, inputs)
    unfused = PassManager((LIFT_RMS_NORM, LIFT_ROTARY), strict=True).run(graph.module)
    assert unfused[-1].matched == 1
    assert all(map(torch.equal, run(graph, inputs), control))
    *_, report = PassManager((LIFT_RMS_NORM, LIFT_ROTARY, FUSE_QK_NORM_ROTARY), strict=True).run(graph.module)
    assert all(map(torch.equal, run(graph, inputs), control))
    return graph, report


def ops(graph: TracedGraph, target: object = QK_NORM_ROTARY.overload) -> list[Any]:
    return [node for node in graph.module.graph.nodes if node.target is target]


FORMS: dict[str, tuple[Model, dict[str, Any]]] = {
    "qwen": (model_of(qwen), {"offset": 0.0, "rotary_dim": 0}),
    "gemma": (model_of(gemma), {"offset": 1.0}),
    "no weights": (model_of(bare), {"normed_dtype": None}),
    "heads first": (model_of(qwen, heads_first=True), {"norm_compute_dtype": F32}),
    "partial": (model_of(gemma, width=4), {"rotary_dim": 4, "style": "half"}),
}
EPS = {"qwen": 1e-6, "gemma": 3e-4, "no weights": 1e-5, "heads first": 1e-6, "partial": 3e-4}


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_fused_and_no_bit_changes(form: str, dtype: torch.dtype) -> None:
    model, expected = FORMS[form]
    graph, report = fused(model, dtype)
    (op,) = ops(graph)
    assert report.matched == 1 and not report.near_misses and not ops(graph, ROTARY.overload)
    bound = QK_NORM_ROTARY.bind(op.args, op.kwargs).args
    assert {name: bound[name] for name in expected} == expected and bound["eps"] == EPS[form]
    assert (bound["query_weight"] is None) == (form == "no weights")
    assert [tuple(bound[name].meta["example_value"].shape) for name in ("query", "key")] == [(2, 4, 5, 8), (2, 2, 5, 8)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_device_without_the_op_has_the_models_own_nodes_again(form: str) -> None:
    graph, _ = fused(FORMS[form][0], BF16)
    control = run(graph, inputs_of(BF16))
    choices = choose_implementations(graph.module, ())
    assert choices[0].op == "core::qk_norm_rotary" and len(choices) == 4
    assert {choice.implementation for choice in choices} == {"original"}
    assert all(map(torch.equal, run(graph, inputs_of(BF16)), control))


@pytest.mark.slow
def test_symbolic_token_counts_are_no_obstacle() -> None:
    dims = {"query": [1], "key": [1], "cos": [1], "sin": [1]}
    _, report = fused(model_of(qwen), BF16, dynamic=dims)
    assert report.matched == 1


def all_heads_at_once(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **weights: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    heads = [bare(x, x).view(2, 5, -1, SIZE).transpose(1, 2) for x in (query, key)]
    return turn(heads[0], cos, sin), turn(heads[1], cos, sin)


def used_twice(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    normed = qwen(query.view(2, 5, -1, SIZE), query_weight)
    others = qwen(key.view(2, 5, -1, SIZE), key_weight).transpose(1, 2)
    return turn(normed.transpose(1, 2), cos, sin), turn(others, cos, sin), normed.sum(-1)


def along_another(x: Tensor, weight: Tensor) -> Tensor:
    return x * 2


NEAR_MISSES: dict[str, tuple[Model, str]] = {
    "another eps": (model_of(qwen, lambda x, w: qwen(x, w, 1e-5)), "eps"),
    "another rounding": (model_of(qwen, lambda x, w: gemma(x, w, 1e-6)), "has"),
    "the key alone": (model_of(along_another, qwen), "only the key"),
    "all heads at once": (all_heads_at_once, "all heads"),
    "used twice": (used_twice, "used otherwise than in"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay_two_ops_with_the_reason(case: str) -> None:
    model, reason = NEAR_MISSES[case]
    graph, report = fused(model, BF16)
    assert report.matched == 0 and not ops(graph) and len(ops(graph, ROTARY.overload)) == 1
    assert [miss for miss in report.near_misses if reason in miss.reason]


def test_tensors_without_a_norm_are_no_near_miss() -> None:
    _, report = fused(model_of(along_another), F32)
    assert report.matched == 0 and not report.near_misses


def test_a_refused_site_leaves_every_node_as_it_was() -> None:
    """No transposition that would only have been the op's is left in front of the norm."""

    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **weights: Tensor) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        heads = [x.view(2, 5, -1, SIZE) for x in (query, key)]
        query, key = (qwen(x, weights[name]).transpose(1, 2) for x, name in zip(heads, weights, strict=True))
        heads[0].mul_(2)
        return turn(query, cos, sin), turn(key, cos, sin)

    inputs = inputs_of(BF16)
    graph = trace(lambda **given: model(**given), inputs, writable=("query",))
    lifts = (LIFT_RMS_NORM, LIFT_ROTARY)
    PassManager(lifts, strict=True).run(graph.module)
    before = to_text(graph.module)
    *_, report = PassManager((*lifts, FUSE_QK_NORM_ROTARY), strict=True).run(graph.module)
    assert report.matched == 0 and to_text(graph.module) == before
    (miss,) = report.near_misses
    assert "written in between" in miss.reason
