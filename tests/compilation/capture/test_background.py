"""core/compilation/capture/background.py: programs that run while their buckets are compiled."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from core import CompileOptions, InputSpec, Program
from core.common.graphs.backend import CallBackend, GraphKey
from core.common.lowering import FlatCallable, LoweringRequest, Lowerings, inline
from core.common.under_way import Steps
from core.compilation.capture import background
from core.errors import CaptureError
from tests.support import compile_with, cpu

SPECS = {"x": InputSpec(("n", 2), torch.float32)}
X = torch.arange(1.0, 7).view(3, 2)
WAIT_S = 30.0
TURN_S = sys.getswitchinterval()


def model(x: Tensor) -> Tensor:
    return (x + 1) * (x + 2)


class Compiler:
    """A lowering whose compiler works until it is told to be done with a size; it notes what it does.

    there: sizes that were compiled before. fails: sizes at which it fails.
    """

    def __init__(self, there: tuple[int, ...] = (), fails: tuple[int, ...] = ()) -> None:
        self.seen: list[str] = []
        self.ran: list[int] = []
        self._there, self._fails = there, fails
        self._done: dict[int, threading.Event] = {}

    def begin(self, request: LoweringRequest) -> Steps[FlatCallable]:
        size = next(int(value.shape[0]) for value in request.example_inputs if isinstance(value, Tensor))
        self.seen.append(f"begin {size}")
        assert request.background
        run = inline(request)
        ended = "end"
        try:
            if size not in self._there:
                yield self.done(size).is_set
            if size in self._fails:
                raise NotImplementedError("op mul\n  at line 3")
            ended = "finish"
        finally:
            self.seen.append(f"{ended} {size}")

        def compiled(*args: Any) -> tuple[Tensor, ...]:
            self.ran.append(size)
            return run(*args)

        return compiled

    def done(self, size: int) -> threading.Event:
        return self._done.setdefault(size, threading.Event())

    def refuse(self, request: LoweringRequest) -> FlatCallable:
        raise AssertionError("it is asked to begin")

    def start(
        self, buckets: list[int], interim: str = "inline", graph_backend: Any = CallBackend, **options: Any
    ) -> Program:
        lowerings = Lowerings(
            available={"slow": self.refuse, "inline": inline},
            default="slow",
            begins={"slow": self.begin},
            interim=interim,
            any_size=frozenset({"inline"}),
        )
        options = {"background": True, **options}
        own = cpu(lowerings=lowerings, graph_backend=graph_backend)
        return compile_with(model, own, inputs=SPECS, buckets=buckets, lowering=None, **options)


def test_a_program_runs_by_the_quicker_lowering_until_its_own_is_there() -> None:
    compiler = Compiler()
    with compiler.start([4]) as program:
        assert torch.equal(program(x=X), model(X)) and compiler.ran == []
        assert sys.getswitchinterval() < TURN_S
        report = program.report()
        assert report.pending == program.keys and list(report.interim.values()) == [2]  # one run to capture it
        assert "not compiled yet: main[4]" in str(report) and report.to_json()["pending"] == ["main[4]"]
        assert not program.wait_compiled(0.01)
        compiler.done(4).set()
        assert program.wait_compiled(WAIT_S)
        assert torch.equal(program(x=X), model(X)) and compiler.ran == [4]
        assert sys.getswitchinterval() == TURN_S
        after = program.report()
        assert after.pending == () and list(after.interim.values()) == [2] and after.num_kernels == 1
        assert "ran before it was compiled: main[4]: 2" in str(after)


def test_what_was_compiled_before_runs_from_the_first_call_on() -> None:
    compiler = Compiler(there=(2, 4, 8))
    with compiler.start([2, 4, 8]) as program:
        assert program.wait_compiled(0)
        assert torch.equal(program(x=X), model(X)) and compiler.ran == [8, 4, 2, 4]
        assert program.report().interim == {} and program.report().num_kernels == 0


def test_a_start_does_not_wait_for_what_follows_a_bucket_that_must_be_compiled() -> None:
    compiler = Compiler(there=(2,))
    with compiler.start([2, 8]) as program:
        compiler.done(8).set()
        assert program.wait_compiled(WAIT_S)
        assert compiler.seen[0] == "begin 8" and sorted(compiler.seen[1:]) == ["begin 2", "finish 2", "finish 8"]


def test_the_bucket_that_ran_most_is_compiled_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_AT_ONCE", 1)
    compiler = Compiler()
    with compiler.start([2, 4, 8]) as program:
        for _ in range(3):
            program(x=X[:2])
        for size in (8, 2, 4):
            compiler.done(size).set()
        assert program.wait_compiled(WAIT_S)
        order = [line for line in compiler.seen if line.startswith("begin")]
        assert order == ["begin 8", "begin 2", "begin 4"]


def test_a_bucket_that_can_not_be_compiled_goes_on_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler(fails=(8,))
    with compiler.start([2, 8]) as program:
        compiler.done(2).set(), compiler.done(8).set()
        assert program.wait_compiled(WAIT_S)
        large = torch.ones(7, 2)
        assert torch.equal(program(x=large), model(large)) and compiler.ran == []
        assert torch.equal(program(x=X[:1]), model(X[:1])) and compiler.ran == [2]
        note = "main[8] goes on by lowering 'inline', as it can't be compiled: NotImplementedError: op mul at line 3"
        assert note in program.report().notes and note in caplog.text
        assert program.report().num_kernels == 1 and program.report().pending == ()


def test_closing_a_program_ends_its_compilers() -> None:
    compiler = Compiler()
    program = compiler.start([2, 8])
    program.close()
    assert "end 8" in compiler.seen and not any(line.startswith("finish") for line in compiler.seen)
    assert "core-compile" not in {thread.name for thread in threading.enumerate()}


class Refusing(CallBackend):
    """Can't capture the smaller bucket."""

    def capture_one(self, key: GraphKey, *given: Any) -> tuple[Tensor, ...]:
        if key.dims == (2,):
            raise RuntimeError("no room")
        return super().capture_one(key, *given)


def test_a_compile_that_fails_leaves_no_compiler() -> None:
    compiler = Compiler()
    with pytest.raises(CaptureError, match="no room"):
        compiler.start([2, 8], graph_backend=Refusing)
    assert compiler.seen == ["begin 8", "end 8"]


def test_without_the_option_or_a_quicker_lowering_it_is_compiled_before() -> None:
    class Plain(Compiler):
        def begin(self, request: LoweringRequest) -> Steps[FlatCallable]:
            assert not request.background
            self.seen.append("begin")
            yield bool
            return inline(request)

    for options in ({"background": False}, {"interim": ""}):
        compiler = Plain()
        with compiler.start([4], **options) as program:
            assert compiler.seen == ["begin"] and program.wait_compiled(0) and program.report().interim == {}


def test_batch_invariance_leaves_no_time_for_another_lowering() -> None:
    assert not CompileOptions(deterministic="batch", background=True).settled.background
