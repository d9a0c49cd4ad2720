"""State that a model keeps: what a trace refuses, restores, repeats, and lets go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.errors import TraceError
from tests.support import refused


def rows(count: int, width: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def traced(model: Any) -> TracedGraph:
    return trace(model, {"x": rows(6)}, dynamic={"x": [0]})


def run(graph: TracedGraph, **inputs: Tensor) -> Any:
    return graph.output.rebuild(graph.module(*graph.values(inputs)), inputs)


class Keeps(nn.Module):
    """Keeps state in one of the ways models do; `way` chooses."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.calls = 0
        self.register_buffer("state", torch.zeros(4))
        self.first, self.second = torch.ones(4), torch.zeros(4)
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "number":
            self.calls += 1
        elif self.way == "computed and returned":
            self.state = self.state * 0.5 + x.sum(0)
            return self.state
        elif self.way == "input":
            self.first = x
        elif self.way == "swap":
            self.first, self.second = self.second, self.first
        elif self.way == "list":
            self.history.append(x + 1)
        return x + self.first.sum()


@pytest.mark.parametrize("way", ["number", "computed and returned", "input", "swap", "list"])
def test_a_model_that_keeps_state_by_assigning_is_refused_and_left_whole(way: str) -> None:
    model = Keeps(way)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = model.first, model.second
    with refused(TraceError, "tracing a model that", "in place"):
        traced(model)
    assert model.calls == 0 and model.history == []
    assert model.first is first and model.second is second
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_in_place_assignment_is_what_the_graph_repeats() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            return x * self.n

    model = Counts()
    buffer = model.n
    graph = traced(model)
    assert model.n is buffer
    for times in (1, 2, 3):
        assert torch.equal(run(graph, x=rows(3)), rows(3) * times)


@pytest.mark.parametrize("write", ["method", "view", "data", "op"])
def test_writes_into_a_declared_input_are_refused(write: str) -> None:
    def model(x: Tensor) -> Tensor:
        if write == "method":
            x.add_(1)
        elif write == "view":
            x[1:].mul_(2)
        elif write == "data":
            x.data.add_(1)
        else:
            torch.ops.aten.add_.Tensor(x, 1)
        return x * 2

    with refused(TraceError, "writes into its declared input 'x'"):
        traced(model)


def test_a_trace_keeps_nothing_alive() -> None:
    weights = []
    for _ in range(3):
        model = nn.Linear(4, 4)
        weights.append(weakref.ref(model.weight))
        graph = traced(lambda x, model=model: model(x))
        del model, graph
    gc.collect()
    assert [ref() for ref in weights] == [None, None, None]
