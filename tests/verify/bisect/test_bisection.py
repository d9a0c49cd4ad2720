"""core/verify/bisect/bisection.py and its stages: a fault of each kind is named with its place, and what is right
passes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.lowering import FlatCallable, LoweringRequest, Lowerings
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.implementation import OpImplementation
from core.common.ops.norm.norms import RMS_NORM, rms_norm
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.norm.rms_norm import LIFT_RMS_NORM
from core.common.passes.pass_guards import Guards
from core.common.passes.results import PassResult
from core.compilation.trace.tracing import trace
from core.engine.check.graphs import PhaseGraph
from core.verify.bisect.bisection import bisect, injected
from core.verify.bisect.report import Bisection, Step
from tests.common.passes.graphs import Stack, find_rms, fusion
from tests.support import Cache, cpu, rewrite

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(9))


def phase(model: Callable[..., Any], *, name: str = "decode", keep: bool = True, **inputs: Tensor) -> PhaseGraph:
    """Return the phase of a model called with inputs by name; keep: let it have the model to run eagerly."""
    called = model.eval() if isinstance(model, nn.Module) else model
    examples = (inputs, {key: value.flip(0) for key, value in inputs.items()})

    def function(**given: Tensor) -> Any:
        return called(**given)

    traced = trace(function, inputs)
    return PhaseGraph(phase=name, traced=traced, examples=examples, function=function if keep else None)


def stack(**options: Any) -> PhaseGraph:
    return phase(Stack(2, size=64), x=X / 8, **options)


def step(found: Bisection, kind: str) -> Step:
    return next(each for each in found.steps if each.kind == kind)


def lowered_with(change: Callable[[fx.GraphModule], None], **fields: Any) -> Any:
    """Return a device whose only lowering runs what `change` makes of the graph."""

    def lower(request: LoweringRequest) -> FlatCallable:
        change(request.graph)
        request.graph.recompile()
        return request.graph.forward

    return cpu(lowerings=Lowerings(available={"acme": lower}, default="acme"), **{"ops": ()} | fields)


def nothing(graph: fx.GraphModule) -> None:
    """Change nothing."""


def implementation(fn: Callable[..., Any], op: str = RMS_NORM.qualified_name) -> OpImplementation:
    return OpImplementation(op=op, name="acme_kernel", fn=fn)


@pytest.mark.slow
def test_what_is_right_passes_and_says_how_much_was_judged() -> None:
    found = bisect([stack()], lowered_with(nothing, ops=(implementation(rms_norm),)), [LIFT_RMS_NORM])
    assert found.passed and found.faults == () and found.headline().startswith("within the criterion")
    passes, ops, lowering, model = (step(found, kind) for kind in ("pass", "op", "lowering", "model"))
    assert (passes.outcome, passes.matched, passes.num_sites, passes.num_values) == ("ok", 5, 5, 12)
    assert (ops.name, ops.matched, ops.num_sites) == ("core::rms_norm -> acme_kernel", 5, 5) and ops.num_values == 10
    assert (lowering.name, lowering.num_values) == ("acme", 2) and model.num_values == 4
    assert found.num_values == 28
    sampled = bisect([stack()], cpu(ops=()), [LIFT_RMS_NORM], level="sample", lowering="inline")
    assert sampled.passed and step(sampled, "pass").num_sites == 1


@pytest.mark.slow
def test_a_pass_that_raises_and_one_that_breaks_the_graph_are_faults() -> None:
    def breaks(graph: fx.GraphModule) -> list[str]:
        graph.graph.erase_node(graph.graph.find_nodes(op="output")[0])
        return ["output"]

    def raises(graph: fx.GraphModule) -> list[str]:
        raise RuntimeError("no such layout")

    def strands(graph: fx.GraphModule) -> list[str]:
        first = graph.graph.find_nodes(op="call_function", target=operator.add)[0]
        first.args = (first.args[0], 3, 4)
        return ["x"]

    passes = [rewrite(raises, name="raises"), rewrite(breaks, name="breaks"), rewrite(strands, name="strands")]
    found = bisect([stack()], cpu(), [*passes, LIFT_RMS_NORM], lowering="inline")
    assert [(fault.name, fault.owner) for fault in found.faults] == [
        ("raises", "acme"),
        ("breaks", "acme"),
        ("strands", "acme"),
    ]
    assert "RuntimeError: no such layout" in found.headline() and "2 more" in found.headline()
    assert "it can't be run: TypeError" in found.faults[2].reason
    assert next(each for each in found.steps if each.name == "lift_rms_norm").outcome == "ok"


def test_what_could_not_be_judged_is_said() -> None:
    def unknown(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("no kernel for fp64")
        return x * 1.0000001

    def put(graph: fx.GraphModule) -> list[str]:
        node = graph.graph.find_nodes(op="call_function", target=torch.nn.functional.silu)[0]
        with graph.graph.inserting_after(node):
            new = graph.graph.call_function(unknown, (node,))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return ["silu"]

    def again(graph: fx.GraphModule) -> list[str]:
        node = graph.graph.find_nodes(op="call_function", target=unknown)[0]
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
        return ["silu"]

    idle = Pass(name="idle", run=lambda context: PassResult(matched=0), owner="acme")
    guarded = replace(idle, name="guarded", guards=Guards(world_size=(8, None)))
    passes = [rewrite(put, name="put"), rewrite(again, name="again"), idle, guarded]
    found = bisect([stack(keep=False)], cpu(), passes, lowering="inline")
    by_name = {each.name: each for each in found.steps}
    assert by_name["put"].outcome == "ok"
    assert by_name["again"].outcome == "unjudged" and "no kernel for fp64" in by_name["again"].note
    assert by_name["idle"].outcome == "skipped" and "matched nothing" in by_name["idle"].note
    assert "it is for 8 or more processes, and this graph is for 1" in by_name["guarded"].note
    assert by_name["program"].outcome == "skipped" and "no function" in by_name["program"].note
    assert "1 steps could not be judged in full" in found.headline()


def test_nothing_judged_is_no_pass() -> None:
    empty = Bisection(steps=(), faults=())
    assert not empty.passed and empty.headline().startswith("NOTHING WAS JUDGED")


def test_an_injected_pass_takes_the_place_of_its_namesake_or_comes_last() -> None:
    wrong, other = fusion(find_rms, name="lift_rms_norm"), fusion(find_rms, name="acme_norm")
    assert injected([LIFT_RMS_NORM, other], wrong) == (wrong, other)
    assert injected([LIFT_RMS_NORM], other) == (LIFT_RMS_NORM, other)


def wrong_eps(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
    # Only where the values are large is this right.
    return rms_norm(x, weight, eps * 10, **options)


def raising(*args: Any, **options: Any) -> Tensor:
    raise RuntimeError("invalid launch")


@pytest.mark.cases(1)
@pytest.mark.parametrize("wrong", [wrong_eps, raising], ids=["eps", "raises"])
def test_a_wrong_op_implementation_is_named_with_its_node(wrong: Callable[..., Any]) -> None:
    found = bisect([stack()], cpu(ops=(implementation(wrong),)), [LIFT_RMS_NORM], lowering="inline")
    (fault, *later) = found.faults
    assert (fault.kind, fault.op, fault.name, fault.owner) == ("op", "core::rms_norm", "acme_kernel", "core")
    assert fault.site == "layers.0.input_layernorm" and fault.nodes == ("rms_norm_default",)
    assert ("invalid launch" if wrong is raising else "output 0: error over bound") in fault.reason
    # The whole is wrong too: the lowered graph calls the implementation, and so does the run op by op.
    assert {each.kind for each in later} <= {"model", "lowering"}


class Viewed(nn.Module):
    """A model that reads the result of a norm as a view, which only rows one after the other allow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.core.rms_norm(x, self.weight, 1e-6).view(-1) * 2


def transposed(*args: Any, **options: Any) -> Tensor:
    return rms_norm(*args, **options).t().contiguous().t()


@pytest.mark.parametrize("level", ["full", "sample"])
def test_an_implementation_with_other_strides_than_its_fake_is_named(level: Any) -> None:
    found = bisect([phase(Viewed(), x=X)], cpu(ops=(implementation(transposed),)), [], level=level, lowering="inline")
    (fault,) = found.faults
    assert (fault.kind, fault.op, fault.name) == ("op", "core::rms_norm", "acme_kernel")
    assert fault.reason == "output 0: strides (1, 32) instead of (64, 1)"
    # What follows is judged with the reference in its place.
    assert step(found, "lowering").outcome == "ok" and step(found, "model").outcome == "ok"


def test_a_graph_that_does_not_run_as_traced_names_the_node() -> None:
    @torch.library.custom_op("acme_strides::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return (x * 2).t().contiguous().t()

    twice.register_fake(torch.empty_like)

    def function(x: Tensor) -> Tensor:
        return twice(x).view(-1)

    found = bisect([phase(function, keep=False, x=X)], cpu(ops=(implementation(rms_norm),)), [], lowering="inline")
    (fault,) = found.faults
    assert fault.kind == "lowering" and fault.nodes == ("twice_default",) and not found.passed
    assert "stops at node view (view)" in fault.reason and "RuntimeError: view size is not compatible" in fault.reason
    where = "node twice_default (torch.ops.acme_strides.twice.default)"
    assert fault.reason.endswith(f"{where} gave strides (1, 32) instead of (64, 1) that its fake says")


class Attends(nn.Module):
    """Attention over a paged cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        arguments = dict(next(iter(ATTENTION.samples(torch.float32, torch.device("cpu")))).kwargs)
        self.given = {name: arguments.pop(name) for name in ("query", "key", "value")}
        self.register_buffer("key_cache", arguments.pop("key_cache"))
        self.register_buffer("value_cache", arguments.pop("value_cache"))
        self.rest = arguments

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        caches = {"key_cache": self.key_cache, "value_cache": self.value_cache}
        return torch.ops.core.attention(query, key, value, **caches, **self.rest) * 2


def test_what_an_implementation_writes_is_judged() -> None:
    def forgets(query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, *rest: Any, **options: Any) -> Tensor:
        result: Tensor = ATTENTION.reference(query, key, value, kept := key_cache.clone(), *rest, **options)
        assert kept is not key_cache
        return result

    model = Attends()
    before = model.key_cache.clone()
    for fn, names in ((ATTENTION.reference, []), (forgets, ["acme_kernel"])):
        device = cpu(ops=(implementation(fn, ATTENTION.qualified_name),))
        found = bisect([phase(model, keep=False, **model.given)], device, [], lowering="inline")
        assert [fault.name for fault in found.faults if fault.kind == "op"] == names
        assert step(found, "op").num_values >= 3 and torch.equal(model.key_cache, before)
    assert found.faults[0].reason.startswith("written key_cache")


def replaced(target: object, new: Callable[..., Any], index: int) -> Callable[[fx.GraphModule], None]:
    """Return a change that gets one call of a function wrong, where it is there."""

    def change(graph: fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            if (
                node.target is target
                and "layers.1" in str(node.meta.get("nn_module_stack"))
                and node.name.endswith("1")
            ):
                node.target = new

    return change


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("new", "reason"),
    [(nn.functional.gelu, "error over bound"), (raising, "it raised RuntimeError: invalid launch")],
    ids=["wrong", "raises"],
)
def test_a_wrong_lowering_is_narrowed_down_to_its_node(new: Callable[..., Any], reason: str) -> None:
    told: list[str] = []
    device = lowered_with(replaced(nn.functional.silu, new, 1))
    found = bisect([stack(keep=False)], device, [LIFT_RMS_NORM], progress=told.append)
    (fault,) = found.faults
    assert (fault.kind, fault.name, fault.nodes) == ("lowering", "acme", ("silu_1",))
    assert fault.site == "layers.1" and reason in fault.reason
    assert "decode: narrowing down lowering acme" in told


def test_a_fault_of_two_nodes_together_is_a_part_of_two_nodes() -> None:
    def fuses(graph: fx.GraphModule) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=torch.relu):
            if getattr(node.args[0], "target", None) is torch.exp:
                node.target = nn.functional.gelu

    def model(x: Tensor) -> Tensor:
        return (torch.relu(torch.exp(torch.relu(x * 2))) + 1).sin()

    found = bisect([phase(model, x=X, keep=False)], lowered_with(fuses), [])
    assert found.faults[0].nodes == ("exp", "relu_1")


def test_a_write_that_a_lowering_loses_is_found() -> None:
    def loses(graph: fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            if node.target == "add_":
                node.target = "add"

    model = Cache()
    inputs = {"x": torch.ones(3, 2), "slots": torch.tensor([4, 2, 9])}
    found = bisect([phase(model, keep=False, **inputs)], lowered_with(loses), [])
    assert found.faults[0].nodes == ("add_",) and "written" in found.faults[0].reason
    assert model.writes.item() == 0 and model.rows.eq(0).all()


def test_the_model_itself_is_the_last_judge_and_its_caches_are_kept() -> None:
    model = Cache()
    inputs = {"x": torch.randn(3, 2), "slots": torch.tensor([4, 2, 9])}
    right = phase(model, **inputs)
    found = bisect([right], cpu(), [], lowering="inline")
    assert found.passed and step(found, "model").num_values == 4
    assert model.writes.item() == 0 and model.rows.eq(0).all()

    def other(**given: Tensor) -> Tensor:
        return model(**given) * 1.01

    found = bisect([replace(phase(model, **inputs), function=other)], cpu(), [], lowering="inline")
    assert (
        found.faults[0].kind == "model"
        and "the finished trace on core, against the model itself, breaks decode" in found.headline()
    )
    assert model.writes.item() == 0


@pytest.mark.slow
def test_several_phases_are_judged_one_after_the_other() -> None:
    wrong = fusion(lambda context, node: _wrong(context, node), name="acme_norm")
    found = bisect([stack(name="prefill"), stack(name="decode")], cpu(), [wrong], lowering="inline")
    assert [fault.phase for fault in found.faults] == ["prefill", "decode"]
    assert [each.phase for each in found.steps].count("prefill") == len(found.steps) / 2
    assert found.to_json()["faults"][0]["text"] == str(found.faults[0])


def _wrong(context: PassContext, node: fx.Node) -> Any:
    found = find_rms(context, node)
    return replace(found, args=(*found.args[:2], 1e-3)) if hasattr(found, "args") else found


class Routed(nn.Module):
    """Chooses an expert for each row by two sums that are equal but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.experts = nn.Parameter(torch.randn(2, 64, 64).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.stack((x.sum(-1), (x[:, ::2] + x[:, 1::2]).sum(-1)), -1)
        chosen: Tensor = self.experts[scores.argmax(-1)]
        return torch.einsum("tk,tkn->tn", nn.functional.silu(x), chosen)


def test_a_choice_that_rounding_tips_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(equation: str, rows: Tensor, chosen: Tensor) -> Tensor:
        first, second = (torch.einsum(equation, rows[:, i::2], chosen[:, i::2]) for i in (0, 1))
        return first + second

    def reorder(graph: fx.GraphModule) -> list[str]:
        graph.graph.find_nodes(op="call_function", target=torch.functional.einsum)[0].target = halves
        return ["einsum"]

    def run() -> Bisection:
        return bisect([phase(Routed(), x=X.bfloat16(), keep=False)], cpu(), [rewrite(reorder)], lowering="inline")

    found = run()
    assert found.passed and 0 < step(found, "pass").worst_ratio <= 1, found.headline()
    # Left to itself the fp64 run chooses other experts, and no yardstick is left.
    monkeypatch.setattr("core.verify.execution._pin", lambda value, decided: value)
    assert "the yardstick itself is off" in run().headline()
