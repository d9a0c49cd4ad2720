"""core/common/passes/moe/route.py: routers of every family become one op, and no bit changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from core.common.ops.moe.route import MOE_ROUTE
from core.common.passes.moe.route import LIFT_MOE_ROUTE
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.execution import run_graph

F32, BF16 = torch.float32, torch.bfloat16
TOKENS, EXPERTS = 19, 8
BIAS = torch.linspace(-0.4, 0.5, EXPERTS)[torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])]
Router = Callable[[Tensor], Any]


def logits(dtype: torch.dtype) -> Tensor:
    """Return logits (T, E) without ties within a token, also once scored in bf16."""
    generator = torch.Generator().manual_seed(5)
    order = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)
    return ((order - 3.3) * (0.2 + 0.3 * torch.rand(TOKENS, 1, generator=generator))).to(dtype)


def mixtral(x: Tensor) -> Any:
    values, indices = torch.topk(F.softmax(x.float(), dim=-1), 2, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)
    return values, indices


def qwen(x: Tensor) -> Any:
    values, indices = torch.topk(F.softmax(x, dtype=torch.float, dim=-1), 3, dim=-1)
    return (values / values.sum(-1, keepdim=True)).to(x.dtype), indices


def olmoe(x: Tensor) -> Any:
    values, indices = F.softmax(x, dim=1, dtype=torch.float).topk(k=3, dim=-1)
    return values.to(x.dtype), indices


def grouped(x: Tensor, *, hidden: float = -math.inf, bias: Tensor | None = BIAS, best: int = 2) -> Any:
    scores = x.float().sigmoid()
    choice = scores if bias is None else scores + bias
    groups = choice.view(-1, 4, 2)
    group_scores = groups.topk(2, dim=-1)[0].sum(dim=-1) if best == 2 else groups.max(dim=-1).values
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, torch.topk(group_scores, k=2, dim=-1, sorted=False)[1], 1)
    kept = mask.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, EXPERTS)
    indices = torch.topk(choice.masked_fill(~kept.bool(), hidden), k=3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, indices)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5, indices


def gpt_oss(x: Tensor) -> Any:
    values, indices = torch.topk(x, 4, dim=-1)
    return F.softmax(values, dim=1, dtype=values.dtype), indices


def granite(x: Tensor) -> Any:
    values, indices = x.float().topk(4, dim=1)
    return torch.softmax(values, dim=1).type_as(x), indices


def lfm2(x: Tensor) -> Any:
    scores = x.sigmoid()
    _, indices = torch.topk(scores + BIAS, k=3, dim=-1)
    weights = torch.gather(scores, dim=1, index=indices).type_as(x)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-6) * 1.0, indices


def sqrtsoftplus(x: Tensor) -> Any:
    scores = F.softplus(x.float()).sqrt()
    indices = (scores + BIAS).topk(3, dim=-1, sorted=False).indices
    weights = scores.gather(1, indices)
    return weights / weights.sum(-1, keepdim=True) * 1.5, indices


SOFTMAX = {"scoring": "softmax", "bias": None, "sorted": True, "num_groups": 0}
FORMS: dict[str, tuple[Router, int, dict[str, Any]]] = {
    "mixtral": (mixtral, 2, SOFTMAX | {"renormalize": True, "renormalize_eps": 0.0, "out_dtype": F32}),
    "qwen": (qwen, 3, SOFTMAX | {"renormalize": True, "compute_dtype": F32, "out_dtype": "own"}),
    "olmoe": (olmoe, 3, SOFTMAX | {"renormalize": False, "scale": 1.0, "out_dtype": "own"}),
    "groups of DeepSeek V3": (
        grouped,
        3,
        {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scored_per_group": 2, "scale": 2.5, "sorted": False}
        | {"renormalize": True, "renormalize_eps": 1e-20},
    ),
    "groups by their best expert": (
        lambda x: grouped(x, hidden=0.0, bias=None, best=1),
        3,
        {"num_groups": 4, "top_groups": 2, "scored_per_group": 1, "bias": None},
    ),
    "gpt-oss": (gpt_oss, 4, {"scoring": "softmax_selected", "compute_dtype": "own", "out_dtype": "own"}),
    "granite": (granite, 4, {"scoring": "softmax_selected", "compute_dtype": F32, "out_dtype": "own"}),
    "lfm2": (
        lfm2,
        3,
        {"scoring": "sigmoid", "renormalize": True, "renormalize_eps": 1e-6, "compute_dtype": "own"},
    ),
    "square root of softplus": (sqrtsoftplus, 3, {"scoring": "sqrtsoftplus", "renormalize": True, "scale": 1.5}),
}


def lifted(router: Router, x: Tensor) -> tuple[TracedGraph, PassReport, bool]:
    """Trace and lift; return the graph, the report, and whether every bit of every output is what it was."""
    graph = trace(lambda x: router(x), {"x": x})
    values = graph.values({"x": x})
    before = run_graph(graph.module, values).outputs
    (report,) = PassManager([LIFT_MOE_ROUTE], strict=True).run(graph.module)
    after = run_graph(graph.module, values).outputs
    return graph, report, all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, after, strict=True))


def routes(graph: TracedGraph) -> list[fx.Node]:
    return [node for node in graph.module.graph.nodes if node.target is MOE_ROUTE.overload]


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_lifted_whole_and_no_bit_changes(form: str, dtype: torch.dtype) -> None:
    router, top_k, expected = FORMS[form]
    graph, report, equal = lifted(router, logits(dtype))
    assert report.matched == 1 and not report.near_misses
    assert equal
    (node,) = routes(graph)
    assert node.args[1] == top_k
    wanted = {name: dtype if value == "own" else value for name, value in expected.items()}
    assert {name: node.kwargs[name] for name in wanted} == wanted
    computing = [n for n in graph.module.graph.nodes if n.op.startswith("call_") and n.target is not MOE_ROUTE.overload]
    assert all(getattr(n.target, "__name__", "") == "getitem" for n in computing)


@pytest.mark.parametrize("scale", [0.5, 2.0, 16.0])
def test_scale_and_eps_are_read_as_values(scale: float) -> None:
    def router(x: Tensor) -> Any:
        values, indices = x.softmax(-1).topk(2)
        return scale * (values / (scale / 8 + values.sum(-1, keepdim=True))), indices

    graph, report, equal = lifted(router, logits(F32))
    assert report.matched == 1 and equal
    assert routes(graph)[0].kwargs["scale"] == scale
    assert routes(graph)[0].kwargs["renormalize_eps"] == scale / 8


def clamped(x: Tensor) -> Any:
    values, indices = x.softmax(-1).topk(2)
    return values / values.sum(-1, keepdim=True).clamp(min=1e-12), indices


def rounded_before_scale(x: Tensor) -> Any:
    values, indices = x.float().softmax(-1).topk(2)
    return values.to(x.dtype) * 2.5, indices


def rounded_before_sum(x: Tensor) -> Any:
    values, indices = x.float().softmax(-1).topk(2)
    values = values.to(x.dtype)
    return values / values.sum(-1, keepdim=True), indices


def also_unnormalised(x: Tensor) -> Any:
    values, indices = x.softmax(-1).topk(2)
    return values / values.sum(-1, keepdim=True), indices, values


@pytest.mark.parametrize(
    "router", [clamped, rounded_before_scale, rounded_before_sum, also_unnormalised], ids=lambda f: f.__name__
)
def test_what_the_op_does_not_know_stays_after_it(router: Router) -> None:
    graph, report, equal = lifted(router, logits(BF16))
    assert report.matched == 1 and equal
    assert not routes(graph)[0].kwargs["renormalize"] and routes(graph)[0].kwargs["scale"] == 1.0


def test_scores_used_elsewhere_stay_available() -> None:
    def router(x: Tensor) -> Any:
        scores = x.sigmoid()
        indices = (scores + BIAS).topk(3).indices
        return scores.gather(-1, indices), indices, scores.mean(0)

    _, report, equal = lifted(router, logits(F32))
    assert report.matched == 1 and equal


def dense(x: Tensor) -> Any:
    values, indices = x.topk(2, dim=1)
    return torch.full_like(x, -math.inf).scatter_(1, indices, values).sigmoid()


def of_another(x: Tensor) -> Any:
    indices = x.sigmoid().topk(2).indices
    return x.abs().gather(1, indices), indices


def with_bias(x: Tensor) -> Any:
    values, indices = (x.sigmoid() + BIAS).topk(2)
    return values, indices


def smallest(x: Tensor) -> Any:
    values, indices = x.softmax(-1).topk(2, largest=False)
    return values, indices


def of_tokens(x: Tensor) -> Any:
    values, indices = x.softmax(-1).topk(2, dim=0)
    return values, indices


def two_softmaxes(x: Tensor) -> Any:
    values, indices = x.topk(2)
    return values.softmax(-1), values.softmax(0), indices


def mask_not_negated(x: Tensor) -> Any:
    scores = x.sigmoid()
    hidden = torch.zeros_like(x[:, :4]).unsqueeze(-1).expand(-1, 4, 2).reshape(-1, EXPERTS).bool()
    indices = scores.masked_fill(hidden, -math.inf).topk(2).indices
    return scores.gather(1, indices), indices


NEAR_MISSES: dict[str, tuple[Router, str]] = {
    "a dense matrix of scores": (dense, "do not become weights by a softmax alone"),
    "weights of another tensor": (of_another, "not from the scores that are ranked"),
    "the bias in the weights": (with_bias, "contain the bias"),
    "the smallest": (smallest, "does not take a fixed number of the largest"),
    "the best tokens": (of_tokens, "does not take a fixed number of the largest of the last dimension"),
    "logits used twice": (two_softmaxes, "do not become weights by a softmax alone"),
    "rank 3": (lambda x: qwen(x[None]), "not experts by tokens"),
    "hidden at 0 with a bias": (lambda x: grouped(x, hidden=0.0), "hidden experts rank 0.0"),
    "another mask": (mask_not_negated, "is no negation"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay_and_say_why(case: str) -> None:
    router, reason = NEAR_MISSES[case]
    graph, report, equal = lifted(router, logits(F32))
    assert report.matched == 0 and not routes(graph) and equal
    (miss,) = report.near_misses
    assert reason in miss.reason and miss.node


def threshold(x: Tensor) -> Tensor:
    return x.masked_fill(x < x.topk(3).values[:, -1:], -math.inf)


def seen(x: Tensor) -> Tensor:
    return torch.full_like(x, -math.inf).scatter(-1, x.topk(3, dim=-1).indices, 0.0)


@pytest.mark.parametrize("function", [threshold, seen], ids=["sampling", "sparse attention"])
def test_other_top_ks_are_no_near_misses(function: Router) -> None:
    _, report, _ = lifted(function, logits(F32))
    assert report.matched == 0 and not report.near_misses
