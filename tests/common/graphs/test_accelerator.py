"""core/common/graphs/accelerator.py: torch's own graphs are tried before they are used, and used in order."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from core.common.graphs.accelerator import AcceleratorGraphs, find_fault
from core.common.graphs.backend import GraphKey
from core.common.graphs.streams import StreamGraphBackend

KEY = GraphKey("main", (4,))


class Graph:
    """A stand-in for `torch.accelerator.Graph`."""

    log: ClassVar[list[Any]]
    fails = ""

    def __init__(self, *, pool: Any, capture_error_mode: str) -> None:
        self.log.append(("new", pool, capture_error_mode))

    def _do(self, what: str) -> None:
        self.log.append(what)
        if what == self.fails:
            raise RuntimeError(f"{what} is broken")

    def capture_begin(self) -> None:
        self._do("begin")

    def capture_end(self) -> None:
        self._do("end")

    def pool(self) -> str:
        return "handle"

    def replay(self) -> None:
        self._do("replay")

    def reset(self) -> None:
        self._do("reset")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    class Own(Graph):
        log: ClassVar[list[Any]] = []

    monkeypatch.setattr(torch.accelerator, "Graph", Own, raising=False)
    return Own


def test_the_first_graph_makes_the_pool_of_all(graphs: type[Graph]) -> None:
    device = AcceleratorGraphs(torch.device("cpu"))
    pool, other = device.new_pool(), device.new_pool()
    for each in (pool, pool, other):
        device.end(device.begin(each))
    new = [line for line in graphs.log if isinstance(line, tuple)]
    assert new == [("new", None, "thread_local"), ("new", "handle", "thread_local"), ("new", None, "thread_local")]
    assert graphs.log.count("begin") == graphs.log.count("end") == 3


def test_a_capture_that_cannot_even_end_is_abandoned(graphs: type[Graph]) -> None:
    device = AcceleratorGraphs(torch.device("cpu"))
    pool = device.new_pool()
    graph = device.begin(pool)
    graphs.fails = "end"
    device.abandon(graph, pool)
    assert graphs.log[-2:] == ["end", "reset"]


def test_a_backend_over_torchs_graphs_replays_and_resets(graphs: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    backend = StreamGraphBackend(AcceleratorGraphs(torch.device("cpu")))
    monkeypatch.setattr(AcceleratorGraphs, "capture_stream", lambda self: torch.no_grad())
    with backend.capture_session(), backend.segment(KEY):
        pass
    backend.replay(KEY)
    backend.cleanup()
    assert graphs.log[1:] == ["begin", "end", "replay", "reset"]


def test_a_torch_without_graphs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.accelerator, "Graph", raising=False)
    assert find_fault(torch.device("cpu")) == f"torch {torch.__version__} has no torch.accelerator.Graph"


def test_a_torch_without_accelerators_is_named(graphs: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    assert find_fault(torch.device("cpu")) == "torch finds no accelerator"


def test_what_the_device_raises_is_the_answer(graphs: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(AcceleratorGraphs, "capture_stream", lambda self: torch.no_grad())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    graphs.fails = "begin"
    assert find_fault(torch.device("cpu")) == "RuntimeError: begin is broken"


def test_a_graph_that_replays_nothing_is_found_out(graphs: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(AcceleratorGraphs, "capture_stream", lambda self: torch.no_grad())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    assert "a captured x + 1 gives" in find_fault(torch.device("cpu"))
