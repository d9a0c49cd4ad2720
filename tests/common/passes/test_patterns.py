"""core/compilation/rewrite/: patterns of torch.fx and of Inductor, counted, named and right."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, fx
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, Match
from torch.nn import functional

from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Guards
from core.common.passes.patterns import InductorGraphPattern, InductorReplacement, Replacement
from core.compilation.rewrite.inductor import as_inductor_pass
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.mechanisms import apply_pass
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.tracing import trace
from core.errors import PassError
from tests.common.passes.graphs import RMS, RmsNorm, Stack, calls, to_aten, traced, traced_graph
from tests.marks import slow_except
from tests.support import refused

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
aten = torch.ops.aten


def norm(x: Any, weight: Any, eps: Any, dtype: Any) -> Any:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)


def fused(x: Any, weight: Any, eps: Any) -> Any:
    return RMS(x, weight, eps)


def declared(**fields: Any) -> Pass:
    pattern = Replacement(
        **dict[str, Any]({"pattern": norm, "replacement": fused, "literals": ("eps", "dtype")} | fields)
    )
    return Pass(name="fuse_rms", mechanism="replace_pattern", patterns=(pattern,), owner="acme")


def run(module: fx.GraphModule, which: Pass, **options: Any) -> PassReport:
    (report,) = PassManager([which], strict=True, **options).run(module, which.stage)
    return report


class Eps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([RmsNorm(eps=eps) for eps in (1e-5, 1e-6, 3e-4, 1e-5)])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.norms:
            x = each(x) + x
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scalars_are_matched_as_values_and_read(dtype: torch.dtype) -> None:
    whole = traced_graph(Eps().to(dtype), X.to(dtype))
    values = whole.values({"x": X.to(dtype)})
    before = whole.module(*values)[0]
    report = run(whole.module, declared())
    assert (report.matched, report.near_misses) == (4, ())
    assert report.sites == ("norms.0", "norms.1", "norms.2", "norms.3")
    assert [node.args[2] for node in calls(whole.module, RMS)] == [1e-5, 1e-6, 3e-4, 1e-5]
    assert torch.equal(whole.module(*values)[0], before)


def test_a_literal_that_is_a_tensor_is_a_near_miss() -> None:
    module = traced(lambda x, y: norm(x, x[0], y, torch.float32), X, torch.ones(4, 1))
    report = run(module, declared())
    assert report.matched == 0
    assert "the pattern wants a number there" in report.near_misses[0].reason


def test_near_relatives_do_not_match() -> None:
    def by_sum(x: Tensor) -> Tensor:
        return x[0] * (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def cubed(x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return x[0] * (wide * torch.rsqrt(wide.pow(3).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def other_dim(x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return x[0] * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + 1e-5)).to(x.dtype)

    for model in (by_sum, cubed, other_dim):
        assert run(traced(model, X), declared()).matched == 0
    right = traced(lambda x: norm(x, x[0], 1e-5, torch.float32), X)
    assert run(right, declared()).matched == 1


@pytest.mark.parametrize(
    ("model", "matched"),
    [
        (lambda x: functional.relu(x) * 2, 1),
        (lambda x: functional.relu(x, inplace=False) * 2, 1),
        (lambda x: torch.nn.ReLU()(x) * 2, 1),
        (lambda x: functional.relu(x + 0.5, inplace=True) * 2, 0),
    ],
)
def test_a_keyword_at_its_default_may_be_written_or_left_out(model: Any, matched: int) -> None:
    doubled = Replacement(pattern=lambda x: functional.relu(x) * 2, replacement=lambda x: torch.clamp(x * 2, min=0))
    which = Pass(name="double_relu", mechanism="replace_pattern", patterns=(doubled,), owner="acme")
    module = trace(model, {"x": X.clone()}).module
    wanted = module(X.clone())[0]
    assert run(module, which).matched == matched
    assert torch.equal(module(X.clone())[0], wanted)


def test_a_check_decides_by_what_was_matched() -> None:
    def check(bound: Mapping[str, Any]) -> str | None:
        return None if bound["eps"] < 1e-4 else f"eps {bound['eps']} is large"

    report = run(traced(Eps(), X), declared(check=check))
    assert report.matched == 3
    assert [(miss.site, miss.reason) for miss in report.near_misses] == [("norms.2", "eps 0.0003 is large")]


def test_patterns_get_the_safety_of_every_fusion() -> None:
    def model(x: Tensor) -> Tensor:
        v = x + 0
        product = v * 2
        v.view(-1).add_(1)
        return product + v

    tripled = Pass(
        name="triple",
        mechanism="replace_pattern",
        patterns=(Replacement(pattern=lambda v: v * 2 + v, replacement=lambda v: v * 3),),
    )
    report = run(traced(model, X), tripled)
    assert report.matched == 0 and "written in between by add_" in report.near_misses[0].reason
    module = traced(lambda x: x * 2 + x, X)
    assert run(module, tripled).matched == 1
    assert [node.args[1] for node in calls(module, operator.mul)] == [3]
    assert all(node.meta.get("example_value") is not None for node in calls(module, operator.mul))


def test_several_patterns_run_in_turn_and_inner_nodes_stay_whole() -> None:
    patterns = (
        Replacement(pattern=lambda v: v.sin().cos(), replacement=lambda v: (v.tanh() + 1).exp()),
        Replacement(pattern=lambda v: v.tanh() + 1, replacement=lambda v: v.sigmoid()),
    )
    module = traced(lambda x: x.sin().cos(), X)
    report = run(module, Pass(name="a", mechanism="replace_pattern", patterns=patterns))
    assert report.matched == 2
    assert [str(node.target) for node in module.graph.nodes if node.op == "call_method"] == ["sigmoid", "exp"]


def test_a_pattern_with_a_tensor_of_its_own_is_refused() -> None:
    weight = torch.ones(16)
    with refused(PassError, "holds a tensor", "make it a parameter"):
        run(traced(torch.sin, X), declared(pattern=lambda x, weight_, eps: x * weight, replacement=fused))


@pytest.mark.parametrize("mechanism", ["replace_pattern", "inductor"])
def test_patterns_of_the_wrong_kind_are_refused(mechanism: Any) -> None:
    wrong: Any = Pass(name="a", mechanism=mechanism, stage="aten", patterns=("x",), owner="acme")  # type: ignore[arg-type]
    with refused(PassError, "pass 'a' of acme", "its pattern 'x'"):
        apply_pass(wrong, PassContext(module=traced(torch.sin, X), name="a", owner="acme"))


def search(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def inductor_rms(dtype: torch.dtype, **fields: Any) -> Pass:
    pattern = InductorReplacement(
        search=search,
        replace=lambda x, weight, eps: RMS(x, weight, eps),
        examples=lambda: [torch.empty(5, 16, dtype=dtype), torch.empty(16, dtype=dtype)],
        scalars={"eps": 0.375},
        **fields,
    )
    return Pass(name="inductor_rms", mechanism="inductor", stage="aten", patterns=(pattern,), owner="acme")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_layers"), slow_except([(torch.bfloat16, 32), (torch.float32, 2)], (torch.float32, 2))
)
def test_inductor_patterns_find_every_norm_of_an_aten_graph(dtype: torch.dtype, num_layers: int) -> None:
    model = Stack(num_layers).to(dtype)
    module = to_aten(model, X.to(dtype))
    report = run(module, inductor_rms(dtype))
    assert (report.matched, report.near_misses) == (2 * num_layers + 1, ())
    assert len(calls(module, RMS)) == report.matched
    assert set(report.sites) == {
        "norm",
        *(f"layers.{i}.{name}" for i in range(num_layers) for name in ("input_layernorm", "post_layernorm")),
    }


def test_inductor_patterns_match_nothing_on_a_dynamo_graph() -> None:
    module = traced(Stack(1), X)
    assert apply_pass(inductor_rms(torch.float32), PassContext(module=module)).matched == 0


@pytest.mark.slow
def test_inductor_scalars_are_read() -> None:
    module = to_aten(Eps().bfloat16(), X.bfloat16())
    assert run(module, inductor_rms(torch.bfloat16)).matched == 4
    assert [node.args[2] for node in calls(module, RMS)] == [1e-5, 1e-6, 3e-4, 1e-5]


@pytest.mark.slow
@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13.dev0"),
    reason="older matchers hide the scalars from a check",
)
def test_inductor_checks_and_guards_name_the_reason() -> None:
    def check(match: Match) -> str | None:
        return None if match.kwargs["eps"] < 1e-4 else "eps is large"

    report = run(to_aten(Eps().bfloat16(), X.bfloat16()), inductor_rms(torch.bfloat16, check=check))
    assert (report.matched, [miss.site for miss in report.near_misses]) == (3, ["norms.2"])
    which = inductor_rms(torch.bfloat16)
    guarded = PassContext(module=to_aten(Eps().bfloat16(), X.bfloat16()), guards=Guards(min_rank=3))
    result = apply_pass(which, guarded)
    assert result.matched == 0 and {miss.reason for miss in result.near_misses} == {"rank 2 is below 3"}


def sine_of_cosine() -> Pass:
    def rewrite(match: Match, x: fx.Node) -> None:
        node = match.output_node()
        new = match.graph.call_function(aten.tanh.default, (x,))
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        match.erase_nodes()

    pattern = InductorGraphPattern(
        pattern=lambda: CallFunction(aten.sin.default, CallFunction(aten.cos.default, KeywordArg("x"))), handler=rewrite
    )
    return Pass(name="tanh", mechanism="inductor", stage="aten", patterns=(pattern,))


def test_inductor_graph_patterns() -> None:
    module = to_aten(lambda x: x.cos().sin() + x.cos(), X)
    assert run(module, sine_of_cosine()).matched == 1
    assert len(calls(module, aten.tanh.default)) == 1 and len(calls(module, aten.cos.default)) == 1


@pytest.mark.slow
def test_the_same_declaration_runs_inside_torch_compile() -> None:
    model, x = Stack(2).bfloat16().eval(), X.bfloat16()
    inside = as_inductor_pass([inductor_rms(torch.bfloat16)], strict=True)
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": inside, "fx_graph_cache": False}
    with torch.no_grad(), torch._inductor.config.patch(options):
        result = torch.compile(model, fullgraph=True)(x)
        expected = model(x)
    (report,) = inside.reports
    assert (report.matched, report.sites[-1] == "norm" or "norm" in report.sites) == (5, True)
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)


def test_the_inductor_pass_is_told_apart_by_its_uuid() -> None:
    ids = {
        as_inductor_pass([inductor_rms(torch.bfloat16)]).uuid(),
        as_inductor_pass([inductor_rms(torch.bfloat16), sine_of_cosine()]).uuid(),
        as_inductor_pass([inductor_rms(torch.float32)]).uuid(),
    }
    assert len(ids) == 3
    assert as_inductor_pass([sine_of_cosine()]).uuid() == as_inductor_pass([sine_of_cosine()]).uuid()
