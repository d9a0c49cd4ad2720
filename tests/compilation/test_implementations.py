"""core/compilation/implementations.py: which implementation a canonical op gets, and why not another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import core.common.ops.canonical  # noqa: F401  # declares rms_norm
from core.common.ops.attention.paged import ATTENTION, reference
from core.common.ops.implementation import OpCall, OpImplementation
from core.common.passes.constants import Constants
from core.compilation.implementations import OpChoice, choose_implementations
from core.errors import LoweringError
from tests.support import refused


def fast(*args: Any, **kwargs: Any) -> Tensor:
    return reference(*args, **kwargs) + 1


def implementation(name: str = "acme_fast", reason: str | None = None, **fields: Any) -> OpImplementation:
    fields = {"fn": fast, "condition": lambda call: reason} | fields
    return OpImplementation(op=fields.pop("op", "core::attention"), name=name, **fields)


@pytest.fixture
def arguments() -> dict[str, Any]:
    return dict(next(iter(ATTENTION.samples(torch.float32, torch.device("cpu")))).kwargs)


def graph(arguments: dict[str, Any], *, calls: int = 1, examples: bool = True) -> fx.GraphModule:
    """Return a graph that calls core::attention on `arguments`, its tensors as placeholders, and adds the outputs."""
    built = fx.Graph()
    nodes = {name: built.placeholder(name) if isinstance(v, Tensor) else v for name, v in arguments.items()}
    for name, node in nodes.items():
        if examples and isinstance(node, fx.Node):
            node.meta["example_value"] = arguments[name]
    outputs = [built.call_function(ATTENTION.overload, kwargs=nodes) for _ in range(calls)]
    built.output((outputs[0] if calls == 1 else built.call_function(torch.add, tuple(outputs)),))
    return fx.GraphModule(torch.nn.Module(), built)


def run(module: fx.GraphModule, arguments: dict[str, Any]) -> Tensor:
    return module(*[v.clone() for v in arguments.values() if isinstance(v, Tensor)])[0]


def test_without_implementations_the_reference_is_called(arguments: dict[str, Any]) -> None:
    module = graph(arguments)
    before = run(module, arguments)
    assert choose_implementations(module, ()) == (
        OpChoice(op="core::attention", node="attention_default", implementation="reference"),
    )
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [ATTENTION.reference]
    assert torch.equal(run(module, arguments), before)


def test_an_implementation_that_applies_is_called(arguments: dict[str, Any]) -> None:
    module = graph(arguments, calls=2)
    before = run(module, arguments)
    choices = choose_implementations(module, [implementation(op="core::other"), implementation()])
    assert [(c.node, c.implementation, c.refused) for c in choices] == [
        ("attention_default", "acme_fast", ()),
        ("attention_default_1", "acme_fast", ()),
    ]
    assert torch.equal(run(module, arguments), before + 2)


def test_the_first_that_applies_wins_and_refusals_are_kept(arguments: dict[str, Any]) -> None:
    candidates = [implementation("one", "no window"), implementation("two"), implementation("three", "unreached")]
    (choice,) = choose_implementations(graph(arguments), candidates)
    assert choice.implementation == "two"
    assert choice.refused == (("one", "no window"),)
    (choice,) = choose_implementations(graph(arguments), candidates[::2])
    assert choice.implementation == "reference"
    assert choice.refused == (("one", "no window"), ("three", "unreached"))


def test_the_condition_sees_every_argument_by_name(arguments: dict[str, Any]) -> None:
    calls: list[OpCall] = []
    choose_implementations(graph(arguments), [implementation(condition=lambda call: calls.append(call))])
    (call,) = calls
    assert call.op == "core::attention"
    assert call.args.keys() == {a.name for a in ATTENTION.overload._schema.arguments}
    assert call.args["max_query_len"] == 1 and call.args["sinks"] is None and call.args["scale"] == 0.25
    assert call.args["query"].shape == arguments["query"].shape


def test_a_raising_condition_is_blamed(arguments: dict[str, Any]) -> None:
    def condition(call: OpCall) -> str | None:
        raise AttributeError("no head size")

    phrases = ("'acme_fast'", "core::attention", "AttributeError: no head size", "None or a reason")
    with refused(LoweringError, *phrases):
        choose_implementations(graph(arguments), [implementation(condition=condition)])


def test_a_node_without_metadata_is_refused(arguments: dict[str, Any]) -> None:
    with refused(LoweringError, "takes node 'query'", "no example value", "node.meta['example_value']"):
        choose_implementations(graph(arguments, examples=False), ())


def test_other_ops_are_left_alone() -> None:
    module = fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    before = module.code
    assert choose_implementations(module, [implementation()]) == ()
    assert module.code == before


def test_what_custom_op_makes_is_taken_as_the_op() -> None:
    @torch.library.custom_op("core_tests::norm", mutates_args=())
    def norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return x * 1

    made = OpImplementation(op="core::rms_norm", name="own", fn=norm)
    module = fx.symbolic_trace(lambda x: torch.ops.core.rms_norm(x, None, 1e-5))
    for node in module.graph.nodes:
        node.meta["example_value"] = torch.ones(2, 4)
    choose_implementations(module, [made])
    assert made.fn is torch.ops.core_tests.norm.default
    assert torch.equal(module(torch.ones(2, 4)), torch.ones(2, 4))


def test_conditions_are_told_which_arguments_are_constants_that_nothing_writes(arguments: dict[str, Any]) -> None:
    told: list[frozenset[str]] = []
    first = implementation(condition=lambda call: told.append(call.constants))
    choose_implementations(graph(arguments), [first])
    bound = {name: arguments[name] for name in ("query", "key_cache")}  # the op writes its caches
    choose_implementations(graph(arguments), [first], constants=Constants(bound))
    assert told == [frozenset(), frozenset({"query"})]
