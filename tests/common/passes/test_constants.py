"""core/common/passes/constants.py: tensors bound to placeholders, and what the manager allows passes to add."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.passes.constants import Constants
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Guards
from core.common.passes.results import PassResult
from core.compilation.rewrite.manager import PassManager
from core.compilation.trace.tracing import trace
from core.errors import PassError
from tests.support import refused

WEIGHT = torch.linspace(0.5, 1.5, 6)
X = torch.linspace(-1.0, 1.0, 12).view(2, 6)


def graph() -> tuple[fx.GraphModule, Constants]:
    module = trace(lambda x: x * WEIGHT, {"x": X}).module
    weight = module.graph.find_nodes(op="placeholder")[-1]
    return module, Constants({weight.name: WEIGHT})


def double(context: PassContext) -> PassResult:
    """Multiply by a doubled weight that is bound beside the first one."""
    assert context.constants is not None
    (product,) = (node for node in context.graph.nodes if node.target is operator.mul)
    weight = product.args[1]
    value = context.constants.value(weight)
    assert value is not None
    node = context.constants.add(context.graph, "doubled", 2 * value, weight)
    product.args = (product.args[0], node)
    return PassResult(matched=1)


def declared(run: Callable[[PassContext], PassResult]) -> Pass:
    return Pass(name="double", owner="acme", run=run, guards=Guards(constants=True))


def test_a_pass_adds_a_placeholder_with_its_tensor() -> None:
    module, constants = graph()
    (report,) = PassManager([declared(double)], strict=True).run(module, constants=constants)
    assert report.matched == 1
    nodes = module.graph.find_nodes(op="placeholder")
    ((name, tensor),) = constants.added
    assert [node.name for node in nodes][-1] == name == "doubled" and len(nodes) == 3
    assert constants.value(nodes[-1]) is tensor and constants.value(nodes[1]) is WEIGHT
    assert constants.value(nodes[0]) is None and constants.value("doubled") is None
    fake = nodes[-1].meta["example_value"]
    assert isinstance(fake, FakeTensor) and fake.shape == (6,) and fake.dtype == WEIGHT.dtype
    assert fake.fake_mode is nodes[1].meta["example_value"].fake_mode
    assert torch.equal(module(X, WEIGHT, tensor)[0], X * WEIGHT * 2)


def test_several_are_added_in_order_and_names_stay_apart() -> None:
    module, constants = graph()
    weight = module.graph.find_nodes(op="placeholder")[-1]
    names = [constants.add(module.graph, "more", torch.full((6,), float(i)), weight).name for i in range(3)]
    assert len(set(names)) == 3
    assert [name for name, _ in constants.added] == names
    assert [node.target for node in module.graph.find_nodes(op="placeholder")][-3:] == names
    assert [float(tensor[0]) for _, tensor in constants.added] == [0.0, 1.0, 2.0]
    assert len(constants.tensors()) == 4
    module.recompile()
    module(X, WEIGHT, *(tensor for _, tensor in constants.added))


def test_without_constants_the_pass_is_skipped_with_the_reason() -> None:
    module, _ = graph()
    (report,) = PassManager([declared(double)], strict=True).run(module)
    assert "weights" in report.skipped and report.matched == 0


def fails(context: PassContext) -> PassResult:
    double(context)
    raise KeyError("late")


def adds_unbound(context: PassContext) -> PassResult:
    double(context)
    with context.graph.inserting_after(context.graph.find_nodes(op="placeholder")[-1]):
        context.graph.placeholder("unbound")
    return PassResult(matched=1)


def adds_first(context: PassContext) -> PassResult:
    double(context)
    first, *_, last = context.graph.find_nodes(op="placeholder")
    first.prepend(last)
    return PassResult(matched=1)


@pytest.mark.parametrize("run", [fails, adds_unbound, adds_first])
def test_what_a_failing_pass_added_goes_with_it(run: Any) -> None:
    module, constants = graph()
    PassManager([declared(double)], strict=True).run(module, constants=constants)
    kept, text = constants.added, module.code
    other = Pass(name="other", owner="acme", run=run)
    (report,) = PassManager([other]).run(module, constants=constants)
    assert report.error and constants.added == kept and module.code == text
    # Another one may still add to the graph that was brought back.
    PassManager([declared(double)], strict=True).run(module, constants=constants)
    assert [name for name, _ in constants.added] == [n.name for n in module.graph.find_nodes(op="placeholder")][2:]
    values: list[Tensor] = [X, WEIGHT, *(tensor for _, tensor in constants.added)]
    assert torch.equal(module(*values)[0], X * WEIGHT * 4)


def test_an_unbound_placeholder_is_refused() -> None:
    module, constants = graph()
    with refused(PassError, "changed the graph's placeholders"):
        PassManager([declared(adds_unbound)], strict=True).run(module, constants=constants)
