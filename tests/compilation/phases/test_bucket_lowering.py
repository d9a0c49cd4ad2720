"""core/compilation/phases/bucket_lowering.py: lowerings whose compiler runs by itself, several buckets at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from core import InputSpec, Program
from core.common.graphs.backend import CallBackend
from core.common.lowering import FlatCallable, LoweringRequest, Lowerings, inline
from core.common.under_way import Steps
from core.compilation import pipeline
from core.errors import LoweringError
from tests.compilation.cache.cached_model import Model, start
from tests.support import compile_with, cpu, refused

SPECS = {"x": InputSpec(("n", 2), torch.float32)}
X = torch.arange(1.0, 7).view(3, 2)


def model(x: Tensor) -> Tensor:
    return (x + 1) * (x + 2)


def _ready() -> bool:
    return True


class Compiler:
    """A lowering in steps, which notes what it does with each size. fails, stops: what happens after the pause."""

    def __init__(self, fails: int = 0, stops: BaseException | None = None) -> None:
        self.seen: list[str] = []
        self._fails, self._stops = fails, stops

    def __call__(self, request: LoweringRequest) -> FlatCallable:
        raise AssertionError("it is asked to begin")

    def begin(self, request: LoweringRequest) -> Steps[FlatCallable]:
        size = next(int(value.shape[0]) for value in request.example_inputs if isinstance(value, Tensor))
        self.seen.append(f"begin {size}")
        finished = False
        try:
            yield _ready
            if size == self._fails:
                raise self._stops or NotImplementedError("op mul")
            finished = True
            return inline(request)
        finally:
            self.seen.append(f"{'finish' if finished else 'end'} {size}")

    def start(self, buckets: list[int], **device: Any) -> Program:
        lowerings = Lowerings(available={"acme": self}, default="acme", begins={"acme": self.begin})
        own = cpu(lowerings=lowerings, **device)
        return compile_with(model, own, inputs=SPECS, buckets=buckets, lowering=None)


@pytest.fixture
def two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pipeline, "MAX_AT_ONCE", 2)
    yield


def test_a_graph_that_is_begun_is_written_as_python_once_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    write, written, given = fx.Graph.python_code, list[fx.Graph](), list[fx.Graph]()

    def noted(graph: fx.Graph, *arguments: Any, **options: Any) -> Any:
        written.append(graph)
        return write(graph, *arguments, **options)

    class Reader(Compiler):
        def begin(self, request: LoweringRequest) -> Steps[FlatCallable]:
            request.graph.recompile()  # as after each change
            given.append(request.graph.graph)
            assert not any(graph is given[0] for graph in written)
            return (yield from super().begin(request))

    monkeypatch.setattr(fx.Graph, "python_code", noted)
    program = Reader().start([3])
    assert torch.equal(program(x=X), model(X))
    assert sum(graph is given[0] for graph in written) == 1


@pytest.mark.usefixtures("two_at_a_time")
def test_the_next_bucket_is_begun_before_one_is_waited_for() -> None:
    compiler = Compiler()
    program = compiler.start([1, 2, 4, 8])
    assert compiler.seen == [
        *("begin 8", "begin 4", "finish 8", "begin 2", "finish 4", "begin 1", "finish 2", "finish 1"),
    ]
    assert [bucket.key.dims for bucket in program.report().buckets] == [(8,), (4,), (2,), (1,)]
    assert torch.equal(program(x=X), model(X))


@pytest.mark.usefixtures("two_at_a_time")
def test_a_compiler_that_fails_meanwhile_names_its_bucket_and_the_others_are_ended() -> None:
    compiler = Compiler(fails=8)
    with refused(LoweringError, "lowering main[8] by 'acme'", "NotImplementedError: op mul", "mode 'off'"):
        compiler.start([2, 4, 8])
    assert compiler.seen == ["begin 8", "begin 4", "end 8", "end 4"]


@pytest.mark.usefixtures("two_at_a_time")
def test_an_interrupt_ends_what_runs() -> None:
    compiler = Compiler(fails=4, stops=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        compiler.start([2, 4, 8])
    assert sorted(compiler.seen[-2:]) == ["end 2", "end 4"]


class Full(CallBackend):
    """A backend with room for one graph."""

    def capture_one(self, key: Any, fn: Any, inputs: Any, after_warmup: Callable[[], None]) -> Any:
        raise RuntimeError("no capture")


@pytest.mark.usefixtures("two_at_a_time")
def test_a_failing_capture_ends_what_runs() -> None:
    compiler = Compiler()
    with pytest.raises(Exception, match="capturing main"):
        compiler.start([2, 4, 8], graph_backend=Full)
    assert "finish 8" in compiler.seen and "end 4" in compiler.seen


class Kept(Compiler):
    """Keeps a file of each graph."""

    def begin(self, request: LoweringRequest) -> Steps[FlatCallable]:
        yield from request.artifacts.begin({}, self.make, self.load)
        return inline(request)

    def make(self, folder: Path) -> Steps[None]:
        self.seen.append("make")
        yield _ready
        (folder / "graph.so").write_text("code")

    def load(self, folder: Path) -> str:
        self.seen.append("load")
        return (folder / "graph.so").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("two_at_a_time", "cache_folder")
def test_equal_graphs_that_are_begun_together_are_made_once() -> None:
    compiler = Kept()
    lowerings = Lowerings(available={"acme": compiler}, default="acme", begins={"acme": compiler.begin})
    phases: dict[str, Any] = {"one": Model().eval(), "two": Model().eval()}

    for expected in (["make", "load", "load"], ["load", "load"]):
        compiler.seen.clear()
        start(phases, device={"lowerings": lowerings}, lowering="acme", buckets={"one": [4], "two": [4]})
        assert compiler.seen == expected
