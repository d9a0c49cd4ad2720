"""core/common/passes/moe/grouped_mlp.py: a mixture's experts become one op, or stay with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

pytest.importorskip("transformers.integrations.moe", reason="needs the extra 'hf'")

from core.common.numerics import judge
from core.common.ops.mlp.activation import GATED_ACTIVATION_FUSED
from core.common.ops.moe.experts import GROUPED_MLP
from core.common.ops.moe.route import MOE_ROUTE
from core.common.passes.mlp.gated_activation import LIFT_GATED_ACTIVATION
from core.common.passes.moe.grouped_mlp import LIFT_GROUPED_MLP
from core.common.passes.moe.route import LIFT_MOE_ROUTE
from core.compilation.implementations import choose_implementations, put_back_unimplemented
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.engine.check.graphs import engine_graphs
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.verify.execution import run_graph
from core.verify.verify import checker
from tests.marks import slow_except
from tests.support import cpu

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
TOKENS, TOP_K, EXPERTS, SIZE, INNER = 37, 2, 5, 16, 24
Step = Callable[..., Any]


def silu_gate(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


def gpt_oss_gate(hidden: Tensor, *, factor: float = 1.702, low: float = -0.5) -> Tensor:
    gate, up = hidden[..., ::2], hidden[..., 1::2]
    gate, up = gate.clamp(min=None, max=0.5), up.clamp(min=low, max=0.5)
    return (up + 1) * (gate * torch.sigmoid(gate * factor))


def relu_squared(hidden: Tensor) -> Tensor:
    return torch.square(F.relu(hidden))


def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the grouped product as transformers traces it: torch's own in bf16, else an op of its own."""
    if rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows.to(matrices.dtype), matrices, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(rows.to(matrices.dtype), matrices, offs=ends)


def plain(rows: Tensor, matrices: Tensor, ends: Tensor, experts: Tensor, biases: Tensor) -> Tensor:
    return product(rows, matrices.transpose(-2, -1), ends)


def transposed_with_biases(rows: Tensor, matrices: Tensor, ends: Tensor, experts: Tensor, biases: Tensor) -> Tensor:
    chosen = biases[experts]
    out = product(rows, matrices, ends)
    out.add_(chosen)
    return out


def transposed_with_biases_at_once(*args: Tensor) -> Tensor:
    rows, matrices, ends, experts, biases = args
    return product(rows, matrices, ends).add_(biases[experts])


def bias_after_a_look(*args: Tensor) -> Tensor:
    rows, matrices, ends, experts, biases = args
    out = product(rows, matrices, ends)
    looked_at = out * 2
    out.add_(biases[experts])
    return out + looked_at


def in_order(rows: Tensor, order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=rows.device)
    return rows[inverse]


def over_experts(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(x.size(0), TOP_K, x.size(1)).sum(dim=1).to(x.dtype)


class Experts(nn.Module):
    """Experts written as transformers' grouped_mm_experts_forward; each step can be replaced by another.

    sentinels: rows of experts that are not here are cleared, as under expert parallelism. gated: the first product
    gives two halves, of which `gate` makes one; else `gate` takes all of it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        transposed: bool = False,
        sentinels: bool = False,
        gated: bool = True,
        **steps: Step,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
            return nn.Parameter(values.to(dtype), requires_grad=False)

        width = 2 * INNER if gated else INNER
        shapes = ((width, SIZE), (SIZE, INNER))
        self.first, self.second = (draw(EXPERTS, *(reversed(s) if transposed else s)) for s in shapes)
        self.first_bias, self.second_bias = draw(EXPERTS, width), draw(EXPERTS, SIZE)
        self.sentinels = sentinels
        self.gate = steps.get("gate", silu_gate)
        self.project = steps.get("project", plain)
        self.count = steps.get("count", lambda e: torch.histc(e.float(), bins=EXPERTS, min=0, max=EXPERTS - 1))
        self.restore = steps.get("restore", in_order)
        self.add_up = steps.get("add_up", over_experts)
        self.token_of = steps.get("token_of", lambda order: order // TOP_K)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        experts, order = torch.sort(indices.reshape(-1))
        rows, row_weights = x[self.token_of(order)], weights.reshape(-1)[order]
        ends = torch.cumsum(self.count(experts), dim=0, dtype=torch.int32)
        elsewhere = None
        if self.sentinels:
            elsewhere = (experts >= EXPERTS).unsqueeze(-1)
            experts.clamp_(max=EXPERTS - 1)
            rows.masked_fill_(elsewhere, 0.0)
        rows = self.project(rows, self.first, ends, experts, self.first_bias)
        rows = self.gate(rows if elsewhere is None else rows.masked_fill(elsewhere, 0.0))
        rows = self.project(rows, self.second, ends, experts, self.second_bias)
        rows = rows if elsewhere is None else rows.masked_fill(elsewhere, 0.0)
        return self.add_up(self.restore(rows * row_weights.unsqueeze(-1), order), x)


def inputs_of(dtype: torch.dtype, *, wide: bool = False, elsewhere: bool = False) -> dict[str, Tensor]:
    """Return tokens, indices of distinct experts, of which expert 3 gets nothing, and weights."""
    generator = torch.Generator().manual_seed(8)
    known = torch.tensor([0, 1, 2, EXPERTS if elsewhere else 4, 4])
    picks = known[torch.rand(TOKENS, 4, generator=generator).argsort(-1)[:, :TOP_K]]
    x = torch.randn(TOKENS, SIZE, generator=generator, dtype=torch.float64).to(dtype)
    return {
        "x": x,
        "indices": picks,
        "weights": torch.rand(TOKENS, TOP_K, generator=generator).to(F32 if wide else dtype),
    }


def traced(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[TracedGraph, list[Any]]:
    graph = trace(lambda x, indices, weights: module(x, indices, weights), inputs)
    return graph, list(graph.values(inputs))


def lift(graph: TracedGraph, values: list[Any]) -> PassReport:
    """Lift, judge the result against an fp64 run of the graph before, and return the report."""
    (report,) = PassManager([LIFT_GROUPED_MLP], strict=True).run(graph.module, check=checker([values], "full"))
    return report


def calls(graph: TracedGraph, target: object = GROUPED_MLP.overload) -> list[fx.Node]:
    return [node for node in graph.module.graph.nodes if node.target is target]


GPT_OSS = {"transposed": True, "project": transposed_with_biases, "gate": gpt_oss_gate}
QUICK = {"kind": "quick_gelu", "interleaved": True, "limit": 0.5, "up_offset": 1.0, "transposed": True}
NEMOTRON: dict[str, Any] = {"gated": False, "gate": relu_squared}
RELU2 = {"kind": "relu2", "gated": False}
BIASED: dict[str, Any] = {"transposed": True, "project": transposed_with_biases}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({}, {"kind": "silu", "transposed": False, "limit": 0.0, "gate_up_bias": None, "down_bias": None}),
    "gpt-oss": (GPT_OSS, QUICK),
    "biases at once": ({**GPT_OSS, "project": transposed_with_biases_at_once}, QUICK),
    "expert parallel": ({"sentinels": True}, {"kind": "silu"}),
    "expert parallel with biases": ({**GPT_OSS, "sentinels": True}, QUICK),
    "nemotron-h": (NEMOTRON, {**RELU2, "gate_up_bias": None, "down_bias": None}),
    "no gate, silu": ({"gated": False, "gate": F.silu}, {"kind": "silu", "gated": False}),
    "no gate, biases": ({**NEMOTRON, **BIASED}, {**RELU2, "transposed": True}),
    "no gate, expert parallel": ({**NEMOTRON, "sentinels": True}, RELU2),
    "inverse by sorting": ({"restore": lambda rows, order: rows[torch.argsort(order)]}, {"kind": "silu"}),
}


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("wide", [False, True], ids=["own weights", "fp32 weights"])
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_lifted_whole(form: str, wide: bool, dtype: torch.dtype) -> None:
    options, expected = FORMS[form]
    inputs = inputs_of(dtype, wide=wide, elsewhere="parallel" in form)
    graph, values = traced(Experts(dtype, **options), inputs)
    before = run_graph(graph.module, values).outputs[0]
    report = lift(graph, values)
    assert report.matched == 1 and not report.near_misses
    (node,) = calls(graph)
    assert {name: node.kwargs[name] for name in expected} == expected
    assert all(n.op in ("placeholder", "get_attr", "output") or n is node for n in graph.module.graph.nodes)
    after = run_graph(graph.module, values).outputs[0]
    assert after.dtype == before.dtype
    if dtype is BF16:  # the reference multiplies by groups too; in fp32 the order of additions within a row differs
        assert torch.equal(after, before)


@DTYPES
def test_a_device_without_the_op_runs_what_the_model_wrote(dtype: torch.dtype) -> None:
    graph, values = traced(Experts(dtype, **GPT_OSS), inputs_of(dtype))
    before = run_graph(graph.module, values).outputs[0]
    assert lift(graph, values).matched == 1
    (choice,) = choose_implementations(graph.module, [])
    assert choice.implementation == "original"
    assert torch.equal(run_graph(graph.module, values).outputs[0], before)


@pytest.mark.cases(1)
@DTYPES
def test_an_accelerator_without_the_op_gets_no_code_that_reads_on_the_host(dtype: torch.dtype) -> None:
    inputs = {name: value.to("meta") for name, value in inputs_of(dtype).items()}
    graph, _ = traced(Experts(dtype, **GPT_OSS).to("meta"), inputs)
    (report,) = PassManager([LIFT_GROUPED_MLP], strict=True).run(graph.module)
    assert report.matched == 1
    assert put_back_unimplemented(graph.module, ()) == (1 if dtype is BF16 else 0)
    choices = choose_implementations(graph.module, [])
    # In bf16 the original is torch's own product, which reads nothing where the device has one.
    assert [choice.implementation for choice in choices] == ([] if dtype is BF16 else ["reference"])


def up_first(hidden: Tensor) -> Tensor:
    up, gate = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


def other_bias(rows: Tensor, matrices: Tensor, ends: Tensor, experts: Tensor, biases: Tensor) -> Tensor:
    return product(rows, matrices.transpose(-2, -1), ends) + biases[0]


def other_ends(rows: Tensor, matrices: Tensor, ends: Tensor, experts: Tensor, biases: Tensor) -> Tensor:
    return product(rows, matrices.transpose(-2, -1), ends if rows.shape[1] == SIZE else ends + 0)


NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "the second half is the gate": ({"gate": up_first}, "activates the second half"),
    "another factor": ({**GPT_OSS, "gate": partial(gpt_oss_gate, factor=1.6)}, "1.6"),
    "another limit for up": ({**GPT_OSS, "gate": partial(gpt_oss_gate, low=-0.4)}, "no gate of its two halves"),
    "no gate": ({"gate": lambda h: F.silu(h)[..., :INNER]}, "no gate of its two halves"),
    "an activation that the op lacks": ({"gated": False, "gate": F.mish}, "is no activation of"),
    "silu rounded once more": ({"gated": False, "gate": lambda h: h * torch.sigmoid(h)}, "rounds once more"),
    "relu squared of a part": (
        {**NEMOTRON, "gated": True, "gate": lambda h: relu_squared(h[..., :INNER])},
        "is no act",
    ),
    "an activation twice": ({"gated": False, "gate": lambda h: F.relu(h).square() + 0.0 * F.relu(h)}, "is no act"),
    "read before the bias": ({**GPT_OSS, "project": bias_after_a_look}, "is read before"),
    "one bias for all": ({"project": other_bias}, "is no bias of each row's expert"),
    "other ends for the second product": ({"project": other_ends}, "divides its rows otherwise"),
    "counts of other experts": (
        {"count": lambda e: torch.histc(e.float(), bins=EXPERTS, min=0, max=EXPERTS)},
        "does not count the rows of 5 experts",
    ),
    "rows left in the experts' order": ({"restore": lambda rows, order: rows[order]}, "does not put the rows back"),
    "the maximum over experts": (
        {"add_up": lambda rows, x: rows.view(x.size(0), TOP_K, x.size(1)).amax(dim=1)},
        "where one sum should follow",
    ),
    "the sum of neighbours": (
        {"add_up": lambda rows, x: rows.view(TOP_K, x.size(0), x.size(1)).sum(dim=0).to(x.dtype)},
        "does not sum over the experts of each token",
    ),
    "tokens chosen otherwise": ({"token_of": lambda order: order % TOP_K}, "is no position divided by"),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay_and_say_why(case: str) -> None:
    options, reason = NEAR_MISSES[case]
    graph, values = traced(Experts(BF16, **options), inputs_of(BF16))
    report = lift(graph, values)
    assert report.matched == 0 and not calls(graph)
    (miss,) = report.near_misses
    assert reason in miss.reason and miss.node


def every_token(x: Tensor, first: Tensor) -> Tensor:
    return torch.bmm((x.repeat(EXPERTS, 1) * 0.5).view(EXPERTS, -1, SIZE), first)


def copied_matrices(x: Tensor, indices: Tensor, first: Tensor) -> Tensor:
    rows = x.repeat_interleave(TOP_K, dim=0)
    return torch.bmm(first[indices.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1)


def test_experts_in_another_order_are_near_misses() -> None:
    inputs = inputs_of(F32)
    first = torch.randn(EXPERTS, SIZE, 2 * INNER)
    by_token = trace(lambda x: every_token(x, first), {"x": inputs["x"]})
    (miss,) = PassManager([LIFT_GROUPED_MLP]).run(by_token.module)[0].near_misses
    assert "multiplies every token by every expert" in miss.reason
    columns = first.transpose(1, 2).contiguous()
    by_row = trace(lambda x, i: copied_matrices(x, i, columns), {"x": inputs["x"], "i": inputs["indices"]})
    (miss,) = PassManager([LIFT_GROUPED_MLP]).run(by_row.module)[0].near_misses
    assert "by matrices of its experts" in miss.reason


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_except(
        [(n, t) for n in ("mixtral", "gpt_oss", "deepseek_v3", "nemotron_h") for t in (F32, BF16)], ("mixtral", BF16)
    ),
    ids=str,
)
def test_a_model_is_lifted_whole(name: str, dtype: torch.dtype) -> None:
    model: Any = build_model(tiny_config(name), torch_device=torch.device("cpu"), dtype=dtype).model
    for buffer in (b for n, b in model.named_buffers() if n.endswith("correction_bias")):
        buffer.copy_(torch.linspace(-0.3, 0.3, buffer.numel()))  # zeros would hide a bias that is lost
    inputs = {"input_ids": torch.arange(3, 40)[None], "position_ids": torch.arange(37)[None]}
    ran: Counter[str] = Counter()
    kinds = {m: type(m).__name__ for m in model.modules() if type(m).__name__.endswith(("Experts", "Router"))}
    hooks = [m.register_forward_hook(lambda m, *_: ran.update([kinds[m][-7:].lower()])) for m in kinds]
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    graph = trace(lambda **kwargs: model(**kwargs, use_cache=False).logits, inputs)
    values = list(graph.values(inputs))
    before = run_graph(graph.module, values).outputs[0]
    passes = [LIFT_MOE_ROUTE, LIFT_GATED_ACTIVATION, LIFT_GROUPED_MLP]
    PassManager(passes, strict=True).run(graph.module, check=checker([values], "full"))
    assert len(calls(graph)) == ran["experts"] > 0
    assert len(calls(graph, MOE_ROUTE.overload)) == ran["_router"] + ran["krouter"] > 0
    # The gate of experts went with them: what is left is that of dense layers and shared experts.
    assert not any("experts" in str(n.args[0]) for n in calls(graph, GATED_ACTIVATION_FUSED.overload))
    after = run_graph(graph.module, values).outputs[0]
    assert torch.equal(after, before) if dtype is BF16 else after.shape == before.shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("changes", [{}, {"attn_implementation": "eager"}, {"moe_latent_size": 24}], ids=str)
@DTYPES
def test_experts_without_a_gate_are_lifted_in_the_engines_graphs(
    phase: str, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    loaded = build_model(tiny_config("nemotron_h", **changes), torch_device=torch.device("cpu"), dtype=dtype)
    with engine_graphs(loaded, cpu(), cache="paged", phases=(phase,)) as (graph,):
        module, (values, *_) = graph.traced.module, graph.values()
        before, exact = run_graph(module, values), run_graph(module, values, fp64=True)
        report = lift(graph.traced, values)
        assert report.matched == 1 and not report.near_misses
        after = run_graph(module, values)
    (node,) = calls(graph.traced)
    assert (node.kwargs["kind"], node.kwargs["gated"]) == ("relu2", False)
    assert judge(after.outputs[0], before.outputs[0], exact.outputs[0]).passed
