"""core/common/passes/rewrite.py: sites are found, named and rewritten; overlaps and malformed sites are refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.node_meta import value_of
from core.common.passes import metadata
from core.common.passes.context import PassContext
from core.common.passes.pass_guards import Guards
from core.common.passes.rewrite import fuse, remove_dead
from core.common.passes.sites import MADE_BY, Site, near_miss, site_name
from core.errors import PassError
from tests.common.passes.graphs import (
    ADD_RMS,
    RMS,
    Stack,
    W,
    X,
    calls,
    doubled,
    find_add_rms,
    find_rms,
    fused,
    rms,
    the_miss,
    traced,
    traced_graph,
)
from tests.support import refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_norm_is_fused_named_and_right(dtype: torch.dtype) -> None:
    model, x = Stack(3).to(dtype), X.to(dtype)
    whole = traced_graph(model, x)
    values = whole.values({"x": x})
    before = whole.module(*values)[0]
    num_nodes = len(whole.module.graph.nodes)
    result = fused(whole.module, find_rms)
    assert result.matched == len(calls(whole.module, RMS)) == 7
    assert result.near_misses == ()
    assert result.sites == (
        *(f"layers.{i}.{name}" for i in range(3) for name in ("input_layernorm", "post_layernorm")),
        "norm",
    )
    assert len(whole.module.graph.nodes) == num_nodes - 7 * 7  # eight nodes became one
    assert torch.equal(whole.module(*values)[0], before)


def test_layers_alike_run_on_fakes_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_runs(num_layers: int) -> int:
        module, run, ran = traced(Stack(num_layers), X), metadata.fake_values, []

        def counted(*call: Any) -> dict[str, Any]:
            ran.append(call)
            return run(*call)

        with monkeypatch.context() as patched:
            patched.setattr(metadata, "fake_values", counted)
            assert fused(module, find_rms).matched == 2 * num_layers + 1
        return len(ran)

    assert num_runs(8) == num_runs(4) == 1


def test_no_tensor_is_compared_while_sites_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = traced(Stack(2), X)

    def compare(*_: object) -> bool:
        raise AssertionError("a comparison of fake tensors runs through torch's dispatcher")

    monkeypatch.setattr(Tensor, "__eq__", compare)
    assert fused(module, find_rms).matched == 5


def test_new_nodes_carry_value_and_origin() -> None:
    module = traced(Stack(1).bfloat16(), X.bfloat16())
    fused(module, find_rms, name="fuse", owner="acme")
    for node in calls(module, RMS):
        assert isinstance(value_of(node), torch._subclasses.FakeTensor)
        assert (value_of(node).shape, value_of(node).dtype) == ((4, 16), torch.bfloat16)
        assert node.meta["stack_trace"] and node.meta["nn_module_stack"]
        made = node.meta[MADE_BY]
        assert (made.pass_name, made.owner, made.site) == ("fuse", "acme", site_name(node))
        assert len(made.replaced) == 1
    assert len({value_of(node).untyped_storage()._cdata for node in calls(module, RMS)}) == 3


def test_an_op_with_two_outputs_replaces_both() -> None:
    model = Stack(3)
    whole = traced_graph(model, X)
    values = whole.values({"x": X})
    before = whole.module(*values)[0]
    result = fused(whole.module, find_add_rms)
    assert result.matched == len(calls(whole.module, ADD_RMS)) == 6
    assert [miss.reason for miss in result.near_misses] == ["the input is no sum"]
    assert not [node for node in calls(whole.module, operator.add) if node.args[1] == 1e-5 and "rms" in node.name]
    getitems = [node for node in whole.module.graph.nodes if node.target is operator.getitem]
    assert len(getitems) == 12 and all(isinstance(value_of(node), Tensor) for node in getitems)
    assert torch.equal(whole.module(*values)[0], before)


def test_an_earlier_use_of_the_second_output_moves_the_op_forward() -> None:
    def model(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        added = x + y
        early = added.sin()
        return rms(added, z, 1e-6), early

    whole = traced_graph(model, X, X + 1, W)
    values = whole.values({"x": X, "y": X + 1, "z": W})
    before = whole.module(*values)

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.mul or "to" not in str(node.args[1]):
            return None
        interior = [n for n in context.graph.nodes if n.op.startswith("call_") and n.target != "sin"]
        added = next(n for n in interior if n.target is operator.add)
        args = (*added.args, node.args[0], 1e-6)
        return Site(anchor=node, target=ADD_RMS, args=args, interior=tuple(interior), outputs=(node, added))

    result = fused(whole.module, find)
    assert result.matched == 1, result
    names = [n.target for n in whole.module.graph.nodes if n.op.startswith("call_")]
    assert names.index(ADD_RMS) < names.index("sin")
    after = whole.module(*values)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_overlapping_sites_of_one_pass_name_both() -> None:
    def model(x: Tensor) -> Tensor:
        return (x * 2 + x) * 2 + x

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not operator.add:
            return None
        # Takes in everything before it, the other site included.
        calls = [n for n in context.graph.nodes if n.op == "call_function"]
        return Site(anchor=node, target=torch.neg, args=(node.args[1],), interior=tuple(calls[: calls.index(node) + 1]))

    with refused(PassError, "pass 'fuse' of acme at add_1", "its site at add (node 'add') claims node 'add' too"):
        fuse(PassContext(module=traced(model, X), name="fuse", owner="acme"), find)


def test_two_passes_that_claim_one_node() -> None:
    def model(x: Tensor) -> Tensor:
        return (x * 2 + x).sin()

    def find_sin(context: PassContext, node: fx.Node) -> Site | None:
        if node.target != "sin":
            return None
        return Site(anchor=node, target=torch.cos, args=(source_of(node),), interior=(node, *node.all_input_nodes))

    module = traced(model, X)
    assert fused(module, doubled(), name="first", owner="acme").matched == 1
    miss = the_miss(fused(module, find_sin, name="second", owner="other"))
    assert "was made by pass 'first' of acme" in miss.reason and miss.claimant == "'first' of acme"
    assert fused(module, find_sin, name="second", after=frozenset({"first"})).matched == 1


def source_of(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0].all_input_nodes[0]


@pytest.mark.parametrize(
    ("guards", "reason"),
    [
        (Guards(dtypes=frozenset({torch.bfloat16})), "dtype torch.float32 is none of torch.bfloat16"),
        (Guards(min_rank=3), "rank 2 is below 3"),
    ],
)
def test_the_guards_hold_at_each_site(guards: Guards, reason: str) -> None:
    assert the_miss(fused(traced(lambda x: x * 2 + x, X), doubled(), guards=guards)).reason == reason


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (lambda node: {"outputs": (node.all_input_nodes[0], node)}, "not the anchor"),
        (lambda node: {"args": (node, 3)}, "a node that it replaces"),
        (lambda node: {"interior": (node, node.args[1])}, "holds a placeholder"),
    ],
)
def test_a_malformed_site_blames_the_finder(fields: Callable[[fx.Node], Any], found: str) -> None:
    def find(context: PassContext, node: fx.Node) -> Site | None:
        site = doubled()(context, node)
        return replace(site, **fields(node)) if isinstance(site, Site) else None

    with refused(PassError, "pass 'fuse' of acme", found, "mend the finder"):
        fuse(PassContext(module=traced(lambda x: x * 2 + x, X), name="fuse", owner="acme"), find)


def test_near_misses_of_the_finder_are_kept() -> None:
    result = fused(traced(lambda x: x.sin(), X), lambda c, n: near_miss(n, "why") if n.target == "sin" else None)
    miss = the_miss(result)
    assert miss.reason == "why" and miss.site == miss.node


def test_a_graph_without_values_can_be_fused() -> None:
    module = fx.symbolic_trace(lambda x: x * 2 + x)
    assert fused(module, doubled()).matched == 1
    assert torch.allclose(module(X), X * 3)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['model'].model.layers.3.input_layernorm", "model.layers.3.input_layernorm"),
        ("L['self']._modules['layers']._modules['0'].norm", "layers.0.norm"),
        ("L['self'].layers[11].norm", "layers.11.norm"),
        ("G['__import_acme_models'].llama.layers.0", "layers.0"),
        ("G['llama'].layers.0", "layers.0"),
        ("L['self'].__closure__[0].cell_contents.layers.0", "layers.0"),
        ("L['self']._model.model.layers.0", "model.layers.0"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self']", "sin"),
        ("layers.0", "layers.0"),
    ],
)
def test_sites_are_named_by_module(path: str, name: str) -> None:
    node = fx.symbolic_trace(lambda x: torch.sin(x)).graph.find_nodes(op="call_function", target=torch.sin)[0]
    node.meta["nn_module_stack"] = {"a": ("L['self']", nn.Module), "b": (path, nn.Module)}
    assert site_name(node) == name


def test_dead_code_goes_and_nothing_else() -> None:
    module = traced(lambda x: (x.sin().cos() * 2, x + 1)[1], X)
    assert remove_dead(module.graph) in (0, 3)
    assert calls(module, "sin") == [] == calls(module, "cos")
    assert len(calls(module, operator.add)) == 1
