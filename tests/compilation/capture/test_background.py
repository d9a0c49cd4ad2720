"""core/compilation/capture/background.py: programs that run while their buckets are compiled."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core import CompileOptions, InputSpec, Program
from core.common.graphs.backend import CallBackend, GraphKey
from core.common.kernel_compilers import Count, KernelCompiler
from core.common.lowering import FlatCallable, LoweringRequest, Lowerings, inline
from core.common.under_way import Steps
from core.compilation.capture import background
from core.compilation.phases import bucket_lowering
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

    there: sizes that were compiled before. fails: sizes at which it fails. refused: those at which it does not begin.
    """

    def __init__(self, there: tuple[int, ...] = (), fails: tuple[int, ...] = (), refused: tuple[int, ...] = ()) -> None:
        self.seen: list[str] = []
        self.ran: list[int] = []
        self._made: list[int] = []
        self._there, self._fails, self._refused = there, fails, refused
        self._done: dict[int, threading.Event] = {}

    def begin(self, request: LoweringRequest) -> Steps[FlatCallable]:
        size = next(int(value.shape[0]) for value in request.example_inputs if isinstance(value, Tensor))
        self.seen.append(f"begin {size}")
        assert request.background
        if size in self._refused:
            raise OSError("no compiler")
        run = inline(request)
        ended = "end"
        try:
            if size not in self._there:
                yield self.done(size).is_set
                self._made.append(threading.get_ident())
            if size in self._fails:
                raise NotImplementedError("op mul\n  at line 3")
            ended = "finish"
            request.note("it is lowered in another way")
        finally:
            self.seen.append(f"{ended} {size}")

        def compiled(*args: Any) -> tuple[Tensor, ...]:
            self.ran.append(size)
            return run(*args)

        return compiled

    def done(self, size: int) -> threading.Event:
        return self._done.setdefault(size, threading.Event())

    @contextmanager
    def counting(self) -> Iterator[Count]:
        before, thread = len(self._made), threading.get_ident()
        yield lambda: self._made[before:].count(thread)

    def refuse(self, request: LoweringRequest) -> FlatCallable:
        raise AssertionError("it is asked to begin")

    def start(
        self,
        buckets: list[int],
        interim: str = "inline",
        graph_backend: Any = CallBackend,
        quick: Any = inline,
        **options: Any,
    ) -> Program:
        lowerings = Lowerings(
            available={"slow": self.refuse, "inline": quick},
            default="slow",
            begins={"slow": self.begin},
            interim=interim,
            any_size=frozenset({"inline"}),
        )
        options = {"background": True, **options}
        own = cpu(lowerings=lowerings, graph_backend=graph_backend)
        counted = KernelCompiler(name="slow", counting=self.counting)
        own = replace(own, parts=replace(own.parts, kernel_compilers=(counted,)))
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
        assert program.report().num_kernels == 1  # the other was there


def test_a_program_counts_its_own_kernels_and_no_others() -> None:
    first, second = Compiler(), Compiler(there=(4,))
    second._made = first._made  # one compiler's, of the process
    with first.start([4]) as program:
        begin, resume = second.begin, program.wait_compiled

        def meanwhile(request: LoweringRequest) -> Steps[FlatCallable]:
            first.done(4).set()
            assert resume(WAIT_S)
            return (yield from begin(request))

        second.begin = meanwhile  # type: ignore[method-assign]
        with second.start([4]) as other:
            assert (program.report().num_kernels, other.report().num_kernels) == (1, 0)


def test_what_is_said_of_a_lowering_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler()
    with compiler.start([2, 4]) as program:
        compiler.done(2).set(), compiler.done(4).set()
        assert program.wait_compiled(WAIT_S)
        assert program.report().notes == ("it is lowered in another way",)
        assert [record.message for record in caplog.records] == ["it is lowered in another way"]


def test_a_program_that_is_compiled_lets_go_of_the_stand_in_and_can_be_dropped() -> None:
    compiler = Compiler()
    program = compiler.start([4])
    compiler.done(4).set()
    assert program.wait_compiled(WAIT_S) and torch.equal(program(x=X), model(X))
    (bucket,) = program._runner.background._buckets
    run, stands_in = bucket._run or (None, True)
    assert not stands_in and bucket._begin is None
    held = weakref.ref(program._runner)
    del program, bucket, run
    gc.collect()
    assert held() is None


def test_a_start_goes_on_where_the_first_bucket_can_not_be_begun() -> None:
    compiler = Compiler(refused=(8,))
    with compiler.start([2, 8]) as program:
        compiler.done(2).set()
        assert program.wait_compiled(WAIT_S)
        assert torch.equal(program(x=X), model(X)) and torch.equal(program(x=X[:1]), model(X[:1]))
        assert compiler.ran == [2] and any("OSError: no compiler" in note for note in program.report().notes)


def test_nothing_stands_in_for_what_was_compiled_before() -> None:
    made: list[str] = []

    def noted(request: LoweringRequest) -> FlatCallable:
        made.append("stand-in")
        return inline(request)

    with Compiler(there=(2, 4)).start([2, 4], quick=noted):
        assert made == []


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
        assert program.report().pending == ()


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


class Plain(Compiler):
    """It is not asked to compile in the background."""

    def begin(self, request: LoweringRequest) -> Steps[FlatCallable]:
        assert not request.background
        self.seen.append("begin")
        yield bool
        return inline(request)


@pytest.mark.parametrize("options", [{"background": False}, {"interim": ""}, {"strict": True}], ids=str)
def test_without_the_option_or_a_quicker_lowering_it_is_compiled_before(options: dict[str, Any]) -> None:
    compiler = Plain()
    with compiler.start([4], **options) as program:
        assert compiler.seen == ["begin"] and program.wait_compiled(0) and program.report().interim == {}


def test_ranks_would_change_over_at_different_steps_so_all_is_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_lowering, "num_ranks", lambda: 2)
    compiler = Plain()
    with compiler.start([4]) as program:
        assert compiler.seen == ["begin"] and program.report().interim == {}


def test_batch_invariance_leaves_no_time_for_another_lowering() -> None:
    assert not CompileOptions(deterministic="batch", background=True).settled.background
