"""core/explain/explanation.py: sites before and after, near-misses with node and reason, layers, and one page of it
all.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.ops.implementation import OpCall, OpImplementation
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.norm.add_rms_norm import FUSE_ADD_RMS_NORM
from core.common.passes.norm.rms_norm import LIFT_RMS_NORM
from core.common.passes.pass_guards import Guards
from core.common.passes.results import NearMiss, PassResult
from core.common.passes.rewrite import fuse
from core.common.passes.sites import Site, near_miss
from core.compilation.rewrite.order import PassSwitches
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.device import Device
from core.engine.check.graphs import PhaseGraph
from core.errors import PassError, UsageError
from core.explain.explanation import Explanation, StageExplanation, explain
from core.explain.html import to_html
from core.explain.layers import compact, layer_kinds, layer_of
from core.explain.text import difference, to_text
from core.host.selection import select_device
from tests.common.passes.graphs import Stack
from tests.page import Page

NORMS = PassSwitches(only=("lift_rms_norm", "fuse_add_rms_norm"))
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


class Odd(nn.Module):
    """Three layers; the middle one's activation is used twice, so that one fusion does not fit there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OddLayer(index == 1) for index in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OddLayer(nn.Module):
    def __init__(self, is_odd: bool) -> None:
        super().__init__()
        self.is_odd = is_odd

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        return torch.neg(y) + y if self.is_odd else torch.neg(y)


def find_neg_relu(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Find neg(relu(x)) and offer clamp(-x, max=0), by torch.neg of relu's input for want of a better op."""
    if node.target is not torch.neg:
        return None
    relu = node.args[0]
    assert isinstance(relu, fx.Node)
    if len(relu.users) > 1:
        return near_miss(node, f"{relu} is used {len(relu.users)} times")
    return Site(anchor=node, target=torch.minimum, args=(relu.args[0], relu.args[0]), interior=(relu, node))


def _fuse(context: PassContext) -> PassResult:
    return fuse(context, find_neg_relu)


def _fail(context: PassContext) -> PassResult:
    raise ValueError(HOSTILE)


def _hostile(context: PassContext) -> PassResult:
    return PassResult(matched=0, near_misses=(NearMiss(site=HOSTILE, reason=HOSTILE, node=HOSTILE, claimant=HOSTILE),))


NEG_RELU = Pass(name="fuse_neg_relu", run=_fuse, owner="acme")


def device(*passes: Pass, ops: tuple[OpImplementation, ...] = ()) -> Device:
    return replace(select_device("cpu"), passes=passes, ops=ops)


def graph(model: nn.Module, size: int = 16) -> PhaseGraph:
    inputs = {"x": torch.ones(3, size)}
    traced: TracedGraph = trace(lambda x: model(x), inputs)
    return PhaseGraph(phase="decode", traced=traced, examples=(inputs,))


def stage_of(explanation: Explanation) -> StageExplanation:
    (phase,) = explanation.phases
    return phase.stages[0]


@pytest.fixture(scope="module")
def stack() -> PhaseGraph:
    return graph(Stack(3))


@pytest.fixture(scope="module")
def odd() -> PhaseGraph:
    return graph(Odd())


def test_every_node_that_went_or_came_is_put_down_to_a_site(stack: PhaseGraph) -> None:
    stage = stage_of(explain([stack], device(), switches=NORMS))
    before, after = ({node.name for node in nodes} for nodes in (stage.before, stage.after))
    assert {node.name for node in stage.before if node.change >= 0} == before - after != set()
    assert {node.name for node in stage.after if node.change >= 0} == after - before != set()
    assert {report.name: report.matched for report in stage.passes} == {"lift_rms_norm": 7, "fuse_add_rms_norm": 6}
    lifted = [change for change in stage.changes if change.pass_name == "lift_rms_norm"]
    assert [change.site for change in lifted if change.made][:2] == [
        "layers.0.input_layernorm",
        "layers.0.post_layernorm",
    ]
    # Cast, square, mean, sum with eps, root, product, cast back, product with the weight.
    assert {len(change.removed) for change in lifted if change.made} == {8}


def test_a_fusion_of_lifted_ops_belongs_to_the_site_that_was_lifted(stack: PhaseGraph) -> None:
    stage = stage_of(explain([stack], device(), switches=NORMS))
    last = stage.changes[-1]
    assert last.pass_name == "fuse_add_rms_norm"
    mates = [change for change in stage.changes if change.group == last.group]
    assert [(change.pass_name, change.site) for change in mates] == [
        ("lift_rms_norm", last.site),
        ("fuse_add_rms_norm", last.site),
    ]
    names = {name for change in mates for name in change.removed}
    assert len(names & {node.name for node in stage.before}) == 9  # the norm and the sum


def test_the_graph_that_was_given_stays_as_it_is(stack: PhaseGraph) -> None:
    nodes = list(stack.traced.module.graph.nodes)
    explain([stack], device(), switches=NORMS)
    assert list(stack.traced.module.graph.nodes) == nodes
    assert not [node for node in nodes if "core::" in str(node.target)]


def test_records_say_what_a_node_computes_where_and_from_which_line(stack: PhaseGraph) -> None:
    stage = stage_of(explain([stack], device(), switches=NORMS))
    found = {node.label: node for node in stage.before}
    assert found["x"].text == "add(l_inputs_x_, linear)"  # the input's own name is taken by a node
    assert found["l_inputs_x_"].text == "input"
    assert found["layers.0.input_layernorm.weight"].text == "bound once"
    root = next(node for node in stage.before if node.op == "rsqrt")
    assert root.path == "layers.0.input_layernorm"
    assert root.value == "float32[3, 1]"
    assert re.fullmatch(r"graphs.py:\d+: normed = wide \* torch.rsqrt.*", root.source)
    (made, *_) = (node for node in stage.after if node.op == "core::add_rms_norm")
    assert "layers.0.post_layernorm.weight, 1e-05" in made.text
    assert made.by == "fuse_add_rms_norm"


def test_a_near_miss_names_layer_node_and_reason_and_the_layer_stands_out(odd: PhaseGraph) -> None:
    stage = stage_of(explain([odd], device(NEG_RELU), switches=PassSwitches(only=("fuse_neg_relu",))))
    (group,) = stage.near_misses
    assert (group.count, group.sites, group.reason) == (1, ("layers.1",), "y_1 is used 2 times")
    assert group.nodes[0] in {node.name for node in stage.before}
    assert [kind.name for kind in layer_kinds(stage.layers)] == ["outside layers", "layers.0,2", "layers.1"]
    assert stage.layers["layers.1"].missed == {"fuse_neg_relu": 1}
    assert stage.layers["layers.2"].matched == {"fuse_neg_relu": 1}


def test_near_misses_that_differ_in_node_numbers_are_one_reason() -> None:
    model = nn.Sequential(*(OddLayer(True) for _ in range(4)))
    stage = stage_of(explain([graph(model)], device(NEG_RELU), switches=PassSwitches(only=("fuse_neg_relu",))))
    (group,) = stage.near_misses
    assert (group.count, group.reason) == (4, "y is used 2 times")
    assert compact(group.sites) == "0-3"
    assert len(set(group.reasons)) == 4


def test_a_pass_that_fails_is_undone_and_said_so_loudly(stack: PhaseGraph) -> None:
    broken = Pass(name="broken", run=_fail, owner="acme")
    explanation = explain([stack], device(broken), switches=PassSwitches(only=("broken",)))
    (report,) = explanation.undone
    assert report.name == "broken"
    assert "UNDONE" in to_text(explanation)
    with pytest.raises(PassError, match="broken"):
        explain([stack], device(broken), switches=PassSwitches(only=("broken",)), strict=True)


def test_passes_that_match_nothing_and_broken_promises_are_told(odd: PhaseGraph) -> None:
    promising = replace(NEG_RELU, expect=3)
    text = to_text(explain([odd], device(promising)))
    assert re.search(r"^matched nothing: .*lift_rms_norm", text, re.M)
    assert re.search(r"fuse_neg_relu .*PROMISE BROKEN: 3 expected", text)


def test_a_stage_is_told_of_where_its_graph_is_another_and_else_its_passes_are(stack: PhaseGraph) -> None:
    def run(context: PassContext) -> PassResult:
        return PassResult(matched=0)

    cases: tuple[tuple[str, list[str]], ...] = (("nothing to do here", ["torch"]), ("", ["torch", "aten"]))
    for reason, stages in cases:
        late = Pass(name="late", run=run, stage="aten", owner="acme", guards=Guards(nothing=lambda _, why=reason: why))
        (phase,) = explain([stack], device(late), switches=PassSwitches(only=("late",))).phases
        assert [stage.stage for stage in phase.stages] == stages
        (report,) = (each for each in phase.stages[-1].passes if each.name == "late")
        assert report.skipped == reason and bool(phase.aten_s) is (len(stages) == 2)


def test_switches_leave_passes_out_and_refuse_unknown_names(stack: PhaseGraph) -> None:
    explanation = explain([stack], device(), switches=PassSwitches(only=()))
    assert not stage_of(explanation).passes
    assert "lift_rms_norm" in explanation.left_out
    assert "no pass is enabled" in to_text(explanation)
    with pytest.raises(UsageError, match="did you mean 'lift_rms_norm'"):
        explain([stack], device(), switches=PassSwitches(disable=("lift_rms_nrm",)))


def test_what_each_op_becomes_is_told_with_the_reasons_against_the_others(stack: PhaseGraph) -> None:
    def refuse(call: OpCall) -> str | None:
        return "rows are too short"

    ops = (
        OpImplementation(op="core::rms_norm", name="long_rows", fn=torch.add, condition=refuse),
        OpImplementation(op="core::add_rms_norm", name="acme_add_norm", fn=torch.add),
    )
    explanation = explain([stack], device(ops=ops), switches=NORMS)
    choices = explanation.phases[0].ops
    assert [c.implementation for c in choices if c.op == "core::add_rms_norm"] == ["acme_add_norm"] * 6
    text = to_text(explanation)
    assert re.search(r"core::add_rms_norm +6 +acme_add_norm", text)
    assert "long_rows: rows are too short" in text


def _aten_noop(context: PassContext) -> PassResult:
    return PassResult(matched=0)


def test_passes_on_aten_ops_get_a_stage_of_their_own(stack: PhaseGraph) -> None:
    late = Pass(name="late", run=_aten_noop, stage="aten", owner="acme")
    (phase,) = explain([stack], device(late), switches=PassSwitches(only=("lift_rms_norm", "late"))).phases
    assert [stage.stage for stage in phase.stages] == ["torch", "aten"]
    assert phase.aten_s > 0
    assert any(node.op.startswith("aten.") for node in phase.stages[1].before)
    assert [report.name for report in phase.stages[1].passes] == ["late"]
    (without,) = explain([stack], device(late), switches=NORMS).phases
    assert ([stage.stage for stage in without.stages], without.aten_s) == (["torch"], 0.0)


def test_the_difference_of_two_graphs_holds_every_node_of_both_once(stack: PhaseGraph) -> None:
    stage = stage_of(explain([stack], device(), switches=NORMS))
    lines = list(difference(stage.before, stage.after))
    assert [node.name for sign, node in lines if sign != "-"] == [node.name for node in stage.after]
    assert sorted(node.name for sign, node in lines if sign != "+") == sorted(node.name for node in stage.before)
    text = to_text(explain([stack], device(), switches=NORMS), full=True)
    assert re.search(r"^- rsqrt: float32\[3, 1\] = rsqrt\(.*# layers.0.input_layernorm  \[lift_rms_norm\]", text, re.M)


def test_json_holds_everything_and_the_graphs_when_asked(stack: PhaseGraph) -> None:
    explanation = explain([stack], device(), switches=NORMS, model={"model": "Stack"})
    document = json.loads(json.dumps(explanation.to_json()))
    stage = document["phases"][0]["stages"][0]
    assert len(stage["nodes"]["before"]) == stage["num_nodes"]["before"]
    assert document["model"] == {"model": "Stack"}
    assert explanation.to_json(nodes=False)["phases"][0]["stages"][0]["nodes"] is None


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model.layers.3.mlp.experts.5", "model.layers.3"),
        ("transformer.h.11", "transformer.h.11"),
        ("0", "0"),
        ("model.norm", ""),
        ("", ""),
    ],
)
def test_the_layer_of_a_path(path: str, layer: str) -> None:
    assert layer_of(path) == layer


def test_names_are_written_in_short() -> None:
    names = ["m.layers.0.mlp", "m.layers.1.mlp", "m.layers.3.mlp", "m.norm", "m.layers.0.attn"]
    assert compact(names) == "m.layers.0-1,3.mlp, m.norm, m.layers.0.attn"


def test_the_page_is_whole_and_needs_nothing_else(stack: PhaseGraph) -> None:
    explanation = explain([stack], device(), switches=NORMS, model={"model": "Stack"})
    text = to_html(explanation)
    page = Page(text)
    stage = stage_of(explanation)
    assert len(page.rows) == len(stage.before) + len(stage.after) - sum(not n.op for n in stage.after) + 1
    assert page.places
    assert page.places <= page.ids
    assert not re.search(r"https?://", text)
    assert "default-src 'none'" in text
    # The nodes of one site carry one number, before and after.
    group = str(stage.changes[-1].group)
    sides = {identity[:3][-1] for identity, row in page.rows.items() if row.get("data-g") == group}
    assert sides == {"a", "b"}


def test_whatever_a_model_or_a_plugin_says_is_text_on_the_page(stack: PhaseGraph) -> None:
    hostile = Pass(name="hostile", run=_hostile, owner=HOSTILE)
    broken = Pass(name="broken", run=_fail, owner="acme")
    explanation = explain([stack], device(hostile, broken), model={HOSTILE: HOSTILE})
    text = to_html(explanation)
    assert HOSTILE not in text
    assert "".join(Page(text).texts).count(HOSTILE) >= 5


def _prepare_weight(context: PassContext) -> PassResult:
    """Bind one weight more, half of another, and add it twice where that one was used."""
    assert context.constants is not None
    inputs = context.graph.find_nodes(op="placeholder")
    weight = next(node for node in inputs if context.constants.value(node) is not None)
    tensor = context.constants.value(weight)
    assert tensor is not None
    half = context.constants.add(context.graph, "half_of_it", tensor / 2, weight)
    weight.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    return PassResult(matched=1, sites=("weights",))


def test_a_weight_that_a_pass_adds_is_an_input_on_the_page(stack: PhaseGraph) -> None:
    preparing = Pass(name="prepare", run=_prepare_weight, owner="acme")
    explanation = explain([stack], device(preparing), switches=PassSwitches(only=("prepare",)))
    (added,) = (node for node in stage_of(explanation).after if node.change >= 0)
    assert (added.name, added.text) == ("half_of_it", "bound once, added by a pass")
    page = Page(to_html(explanation))
    assert page.places <= page.ids
    assert any("data-g" in row for row in page.rows.values())


def test_a_near_miss_is_told_at_its_node(odd: PhaseGraph) -> None:
    explanation = explain([odd], device(NEG_RELU), switches=PassSwitches(only=("fuse_neg_relu",)))
    text = "".join(Page(to_html(explanation)).texts)
    assert re.search(r"neg_1.*\s+fuse_neg_relu did not match: y_1 is used 2 times", text)


def test_the_passes_used_here_are_the_common_ones() -> None:
    assert (LIFT_RMS_NORM.name, FUSE_ADD_RMS_NORM.name) == NORMS.only
