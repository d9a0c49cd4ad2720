"""core/compilation/trace/tracing.py: what a trace keeps, what it refuses, and that it leaves the model as it was."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.compilation.trace.traced import ConstantSlot, InputSlot, SizeSlot, TracedGraph
from core.compilation.trace.tracing import trace
from core.errors import CaptureError, TraceError
from tests.support import Block, Cache, refused


@dataclasses.dataclass
class Answer:
    """An output class as models define them."""

    hidden: Tensor
    loss: Tensor | None = None


pytree.register_dataclass(Answer)


def rows(count: int, width: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def traced(model: Callable[..., Any], count: int = 6, **more: Tensor) -> TracedGraph:
    inputs = {"x": rows(count), **more}
    return trace(model, inputs, dynamic={name: [0] for name in inputs})


def run(graph: TracedGraph, **inputs: Tensor) -> Any:
    """Run the traced graph as a program does: bound slots in, the model's own structure out."""
    with torch.no_grad():
        return graph.output.rebuild(graph.module(*graph.values(inputs)), inputs)


def same(got: Any, want: Any) -> bool:
    (left, spec), (right, other) = pytree.tree_flatten(got), pytree.tree_flatten(want)
    equal = [torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(left, right, strict=True)]
    return spec == other and type(got) is type(want) and all(equal)


STRUCTURES: dict[str, Callable[[Tensor], Any]] = {
    "single tensor": lambda x: x + 1,
    "tuple of one": lambda x: (x + 1,),
    "tuple": lambda x: (x + 1, x * 2),
    "list in dict": lambda x: {"a": [x + 1, x * 2], "b": x.sum(-1)},
    "dataclass": lambda x: Answer(hidden=x + 1),
    "None in it": lambda x: (x + 1, None),
    "numbers and text in it": lambda x: {"x": x + 1, "scale": 2.5, "count": 3, "kind": "logits"},
    "one tensor twice": lambda x: (lambda y: (y, y))(x + 1),
    "the input as it is": lambda x: (x, x + 1),
    "the input alone": lambda x: x,
    "a constant tensor": lambda x: (x + 1, torch.ones(3)),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_output_structure_is_the_models_own(name: str) -> None:
    model = STRUCTURES[name]
    graph = traced(model)
    assert graph.output.is_single == (name in ("single tensor", "the input alone"))
    for count in (6, 9):
        assert same(run(graph, x=rows(count)), model(rows(count))), count


def test_an_input_returned_is_the_callers_own() -> None:
    x = rows(6)
    assert run(traced(lambda x: (x, x + 1)), x=x)[0] is x


@pytest.mark.slow
def test_a_transformers_model_and_its_output_class() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(10).view(1, 10)

    def step(input_ids: Tensor) -> Any:
        return model(input_ids=input_ids, use_cache=False)

    graph = trace(step, {"input_ids": ids}, dynamic={"input_ids": [1]})
    for given in (ids, torch.arange(13).view(1, 13)):
        with torch.no_grad():
            got, want = run(graph, input_ids=given), step(given)
        assert type(got) is type(want)
        torch.testing.assert_close(got.logits, want.logits)


def test_weights_are_bound_once_and_inputs_stay_inputs() -> None:
    model = Block()
    graph = trace(model, {"x": rows(6, 16)}, dynamic={"x": [0]})
    constants = [slot.value for slot in graph.slots if isinstance(slot, ConstantSlot)]
    assert {id(value) for value in constants} == {id(p) for p in model.parameters()}
    assert [slot.name for slot in graph.slots if isinstance(slot, InputSlot)] == ["x"]
    x = rows(9, 16)
    with torch.no_grad():
        assert torch.equal(run(graph, x=x), model(x))
        model.up.weight.mul_(2)
        assert torch.equal(run(graph, x=x), model(x))


def test_tied_weights_are_one_constant() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Tied()
    graph = traced(model)
    assert [slot.value is model.first.weight for slot in graph.slots if isinstance(slot, ConstantSlot)] == [True]
    with torch.no_grad():
        assert torch.equal(run(graph, x=rows(5)), model(rows(5)))


def test_a_closure_keeps_its_tensor() -> None:
    offset = torch.linspace(0, 1, 4)
    graph = traced(lambda x: x + offset)
    assert torch.equal(run(graph, x=rows(3)), rows(3) + offset)
    offset.add_(1)
    assert torch.equal(run(graph, x=rows(3)), rows(3) + offset)


def test_a_size_becomes_a_slot() -> None:
    graph = traced(lambda x: x.view(x.shape[0] * 2, 2))
    assert SizeSlot("x", 0) in graph.slots
    assert run(graph, x=rows(7)).shape == (14, 2)
    with refused(CaptureError, "where padding lies in it is unknown"):
        graph.crop({"x": rows(5)})
    assert graph.shapes == {"x": (6, 4)}


def test_a_declared_dimension_holds_for_other_sizes_and_no_other_does() -> None:
    graph = traced(lambda x: x + 1)
    assert graph.why_not_for({"x": rows(6)}) is None
    assert graph.why_not_for({"x": rows(99)}) is None
    assert graph.why_not_for({"x": rows(6, 5)}) == "x was fixed at size 4 in dimension 1"
    fixed = trace(lambda x: x + 1, {"x": rows(6)})
    assert fixed.why_not_for({"x": rows(7)}) == "x was fixed at size 6 in dimension 0"


@pytest.mark.parametrize("count", [0, 1])
def test_sizes_below_two_are_traces_of_their_own(count: int) -> None:
    graph = traced(lambda x: x * 2)
    reason = graph.why_not_for({"x": rows(count)})
    assert reason is not None and f"x has size {count} in dimension 0" in reason
    alone = traced(lambda x: x * 2, count)
    assert alone.why_not_for({"x": rows(count)}) is None
    assert alone.why_not_for({"x": rows(6)}) == f"x was fixed at size {count} in dimension 0"


def alias(x: Tensor) -> Tensor:
    y = x * 1
    flat = y.t().contiguous()  # a copy of several rows, and of one row y itself
    y.add_(1)
    return flat + 1


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("model", "serves_one"),
    [
        (lambda x: x * 2, True),
        (lambda x: x + x[:1], True),
        (lambda x: x[None].transpose(1, 2).reshape(-1, 4), False),
        (lambda x: torch.cat([x, x[1:]]), True),
        (lambda x: x + 1 if x.shape[0] == 1 else x - 1, False),
        (lambda x: x + 1 if x.shape[0] > 1 else x - 1, False),
        (lambda x: x + 1 if x.numel() == 4 else x - 1, False),
        (lambda x: x + 1 if x.shape[0] - 1 else x - 1, False),
        (lambda x: x + 1 if x.t().is_contiguous() else x - 1, False),
        (lambda x: x + 1 if x.squeeze(0).dim() == 1 else x - 1, False),
        (lambda x: x + 1 if x.squeeze().dim() == 1 else x - 1, False),
        (lambda x: x + 1 if torch.squeeze(x, dim=(0,)).dim() == 1 else x - 1, False),
        (lambda x: x[..., None].squeeze(-1) * 2, True),
        (lambda x: torch.stack([x[0], x[1]]), False),
        (alias, False),
    ],
)
def test_a_trace_from_one_serves_it_where_the_model_does_the_same(
    model: Callable[[Tensor], Tensor], serves_one: bool
) -> None:
    inputs = {"x": rows(6)}
    graph = trace(model, inputs, dynamic={"x": [0]}, least=1)
    assert (graph.why_not_for({"x": rows(1)}) is None) == serves_one
    assert "size 0" in str(graph.why_not_for({"x": rows(0)}))
    for count in (1, 2, 7) if serves_one else (2, 7):
        if graph.why_not_for({"x": rows(count)}) is None:
            got, want = run(graph, x=rows(count)), model(rows(count))
            assert got.shape == want.shape and torch.equal(got, want)
    # Padding one row to several disregards that, as it does in traces from two.
    assert graph.why_branches_differ({"x": rows(1)}) is None or "x[0]" in str(model)


def test_what_is_asked_of_a_graph_after_the_trace_is_as_of_any_trace() -> None:
    """Passes see sizes from 2 on, whatever the trace serves: what they ask leaves no condition."""
    graph = trace(lambda x: x * 2, {"x": rows(6)}, dynamic={"x": [0]}, least=1)
    size = graph.outputs[0].shape[0]
    assert bool(size != 1) and bool(size * 4 > 4) and not graph.shape_env.guards
    assert graph.why_not_for({"x": rows(1)}) is None


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x * torch.ones(4) + x.mean(-1, keepdim=True),
        lambda x: x.reshape(-1, 2, 2).transpose(0, 1).contiguous(),
        lambda x: nn.functional.rms_norm(x, (4,)),
    ],
)
def test_what_torch_asked_while_tracing_is_not_remembered(model: Callable[[Tensor], Tensor]) -> None:
    """An answer from sizes that began at 1 would hide from passes what they know of any other trace."""
    graph = trace(model, {"x": rows(6)}, dynamic={"x": [0]}, least=1)
    (symbol,) = graph.symbols
    for question in (sympy.Ne(symbol, 1), sympy.Eq(symbol, 1), symbol > 1):
        assert graph.shape_env._maybe_evaluate_static(question) in (sympy.true, sympy.false), question


def test_a_trace_from_one_at_size_one_is_fixed_there() -> None:
    graph = trace(lambda x: x * 2, {"x": rows(1)}, dynamic={"x": [0]}, least=1)
    assert graph.why_not_for({"x": rows(2)}) == "x was fixed at size 1 in dimension 0"


def test_a_branch_on_a_size_is_kept_as_a_condition() -> None:
    def model(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] > 4 else x - 1

    large, small = traced(model, 8), traced(model, 3)
    assert large.why_not_for({"x": rows(5)}) is None
    assert "x has size 4" in str(large.why_not_for({"x": rows(4)}))
    assert small.why_not_for({"x": rows(5)}) is not None
    for graph, count in ((large, 5), (small, 4)):
        assert torch.equal(run(graph, x=rows(count)), model(rows(count)))


def test_a_branch_on_two_sizes_is_kept_too() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum() if x.shape[0] > y.shape[0] else x.sum() - y.sum()

    graph = traced(model, 8, y=rows(3))
    assert graph.why_not_for({"x": rows(9), "y": rows(2)}) is None
    assert "branches on a size" in str(graph.why_not_for({"x": rows(5), "y": rows(9)}))


def test_sizes_that_the_model_ties_have_to_stay_equal() -> None:
    graph = traced(lambda x, y: x + y, 6, y=rows(6) * 2)
    assert graph.why_not_for({"x": rows(9), "y": rows(9)}) is None
    assert graph.why_not_for({"x": rows(9), "y": rows(8)}) is not None


def test_sizes_that_are_equal_by_chance_stay_independent() -> None:
    graph = traced(lambda x, y: (x + 1, y + 1), 6, y=rows(6))
    assert graph.why_not_for({"x": rows(9), "y": rows(4)}) is None
    assert [crop[0] for crop in graph.crop({"x": rows(9), "y": rows(4)})] == [slice(9), slice(4)]


def test_an_input_that_the_model_ignores_may_have_any_size() -> None:
    graph = traced(lambda x, y: x + 1, 6, y=rows(6))
    assert graph.why_not_for({"x": rows(9), "y": rows(1)}) is None
    assert torch.equal(run(graph, x=rows(9), y=rows(1)), rows(9) + 1)


def test_an_input_of_which_only_the_size_is_used() -> None:
    graph = traced(lambda x, y: x + y.shape[0], 6, y=rows(6))
    assert graph.why_not_for({"x": rows(9), "y": rows(3)}) is None
    assert torch.equal(run(graph, x=rows(9), y=rows(3)), rows(9) + 3)
    assert "y was fixed at size 4 in dimension 1" in str(graph.why_not_for({"x": rows(9), "y": rows(3, 5)}))


def test_in_place_writes_into_buffers_stay_in_the_graph() -> None:
    model = Cache()
    inputs = {"x": torch.ones(3, 2), "slots": torch.tensor([4, 5, 6])}
    graph = trace(model, inputs)
    assert int(model.writes) == 0 and not model.rows.any()
    assert torch.equal(run(graph, **inputs), torch.full((3, 2), 2.0))
    assert int(model.writes) == 1
    assert model.rows.any(-1).nonzero().flatten().tolist() == [4, 5, 6]


def test_tracing_runs_nothing_of_the_model() -> None:
    calls: list[str] = []
    model = Cache()
    graph_state = {name: value.clone() for name, value in model.state_dict().items()}

    @torch.library.custom_op("tracing_test::count", mutates_args=())
    def count(x: Tensor) -> Tensor:
        calls.append("ran")
        return x.clone()

    count.register_fake(lambda x: torch.empty_like(x))

    def step(x: Tensor, slots: Tensor) -> Tensor:
        return model(count(x), slots)

    inputs = {"x": torch.ones(3, 2), "slots": torch.tensor([4, 5, 6])}
    graph = trace(step, inputs)
    assert calls == []
    assert all(torch.equal(value, graph_state[name]) for name, value in model.state_dict().items())
    assert torch.equal(inputs["x"], torch.ones(3, 2))
    run(graph, **inputs)
    assert calls == ["ran"]


def prints(x: Tensor) -> Tensor:
    y = x + 1
    print("the graph breaks here")  # noqa: T201  # that is the test
    return y


def wrong_sizes(x: Tensor) -> Tensor:
    return x @ x


@pytest.mark.parametrize(
    ("model", "line"),
    [(prints, 'print("the graph breaks here")'), (wrong_sizes, "x @ x")],
    ids=["graph break", "invalid model"],
)
def test_what_cannot_be_traced_names_the_place_in_the_users_code(model: Callable[..., Any], line: str) -> None:
    name = model.__name__
    with refused(TraceError, f"tracing {name} as one graph", __file__, f"in {name}", line, "mode 'off'"):
        traced(model)


def test_a_model_that_lacks_an_input_is_refused() -> None:
    with refused(TraceError, "tracing Linear as one graph", "Argument mismatch", "'x'"):
        traced(nn.Linear(4, 4))


def test_a_size_in_the_output_is_refused() -> None:
    with refused(TraceError, "output holds a size", "is no tensor", "return tensors only") as _:
        traced(lambda x: (x + 1, x.shape[0]))


def test_an_output_that_is_no_tree_of_tensors_is_refused() -> None:
    with refused(TraceError, "returns 'set'", "torch.utils._pytree", "registered output class"):
        traced(lambda x: {x + 1})


def test_a_model_without_operations_is_refused() -> None:
    with refused(TraceError, "tracing constant", "no torch operation"):
        trace(constant, {})


def constant() -> int:
    return 3


@pytest.mark.slow
def test_one_model_can_be_traced_many_times() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def step(x: Tensor) -> Tensor:
        return model(x)

    for count in range(2, 16):  # Dynamo's recompile limit is 8
        assert torch.equal(run(trace(step, {"x": rows(count)}), x=rows(count)), model(rows(count)).detach())


def test_a_trace_does_not_keep_the_model_alive() -> None:
    model = Block()
    alive = weakref.ref(model)
    graph = trace(model, {"x": rows(6, 16)}, dynamic={"x": [0]})
    del model, graph
    gc.collect()
    assert alive() is None


def test_the_callers_dynamo_settings_are_left_alone() -> None:
    config: Mapping[str, Any] = torch._dynamo.config.get_config_copy()  # type: ignore[attr-defined]
    grad = torch.is_grad_enabled()
    traced(lambda x: x + 1)
    with refused(TraceError):
        traced(prints)
    assert torch._dynamo.config.get_config_copy() == config  # type: ignore[attr-defined]
    assert torch.is_grad_enabled() == grad
