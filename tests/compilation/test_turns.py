"""core/compilation/capture/turns.py: calls of one program by several threads are refused or wait; none is wrong."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, Event
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import InputSpec, Program
from core.compilation.capture.runner import GraphRunner
from core.errors import UsageError
from tests.recording import acme
from tests.support import compile_with, cpu, refused

THREADS, CALLS = 4, 2000
ROWS = {"x": InputSpec(("n", 2), torch.float32)}


def double(x: Tensor) -> Tensor:
    return x * 2


def compiled(**options: Any) -> Program:
    device = options.pop("device", None) or cpu()
    return compile_with(double, device, inputs=ROWS, buckets=[2, 4], lowering="inline", strict=True, **options)


@pytest.fixture
def busy() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def hammer(program: Program) -> tuple[int, int, int]:
    """Call from several threads at once; return how many calls were right, wrong and refused."""
    start = Barrier(THREADS)

    def work(thread: int) -> tuple[int, int, int]:
        right = wrong = refusals = 0
        inputs = [torch.full((1 + call % 4, 2), float(thread * CALLS + call)) for call in range(8)]
        start.wait()
        for call in range(CALLS):
            x = inputs[call % 8]
            try:
                found = program(x=x)
            except UsageError:
                refusals += 1
                continue
            if torch.equal(found, x * 2):
                right += 1
            else:
                wrong += 1
        return right, wrong, refusals

    with ThreadPoolExecutor(THREADS) as pool:
        each = list(pool.map(work, range(THREADS)))
    right, wrong, refusals = map(sum, zip(*each, strict=True))
    assert right + wrong + refusals == THREADS * CALLS
    return right, wrong, refusals


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["refuse", "serialize"])
def test_no_call_of_8000_by_four_threads_is_wrong(threads: Any, busy: None) -> None:
    right, wrong, refusals = hammer(compiled(threads=threads))
    assert wrong == 0
    assert right == THREADS * CALLS if threads == "serialize" else right and refusals


@pytest.mark.slow
def test_serialised_results_are_copies_where_graphs_reuse_their_outputs(busy: None) -> None:
    assert hammer(compiled(threads="serialize", device=acme())) == (THREADS * CALLS, 0, 0)
    program = compiled(threads="serialize", device=acme())
    first = program(x=torch.ones(3, 2))
    program(x=torch.zeros(3, 2))
    assert first.tolist() == [[2.0, 2.0]] * 3
    shared = compiled(device=acme())
    first = shared(x=torch.ones(3, 2))
    shared(x=torch.zeros(3, 2))
    assert first.tolist() == [[0.0, 0.0]] * 3  # a view, valid until the next replay, as documented


class Held:
    """Stops each replay until it is let go, so that a call is surely under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside, self.go = Event(), Event()
        plain = GraphRunner.replay

        def replay(runner: GraphRunner, *args: Any) -> Any:
            self.inside.set()
            assert self.go.wait(20)
            return plain(runner, *args)

        monkeypatch.setattr(GraphRunner, "replay", replay)


def test_what_runs_during_a_call_is_refused_and_the_call_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled()
    key, staging = program.keys[0], program.staging()
    held = Held(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(program, x=torch.ones(3, 2))
        assert held.inside.wait(20)
        phrases = ("while another call of it runs", "each other's inputs", 'threads="serialize"')
        for use in (lambda: program(x=torch.zeros(3, 2)), lambda: program.replay(key), program.close):
            with refused(UsageError, *phrases):
                use()
        with refused(UsageError, *phrases):
            staging.replay(key)
        held.go.set()
        assert running.result(20).tolist() == [[2.0, 2.0]] * 3
    assert program(x=torch.zeros(3, 2)).tolist() == [[0.0, 0.0]] * 3  # one thread after the other is fine


def test_a_call_that_fails_ends_its_turn() -> None:
    program = compiled()
    for _ in range(2):
        with refused(UsageError, "input 'x' of torch.float64"):
            program(x=torch.ones(3, 2, dtype=torch.float64))
    assert program(x=torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(("threads", "phrase"), [("refuse", "each other's inputs"), ("serialize", "wait for itself")])
def test_a_call_from_inside_a_call_is_refused(threads: Any, phrase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(threads=threads)
    plain = GraphRunner.replay

    def again(runner: GraphRunner, *args: Any) -> Any:
        program(x=torch.ones(3, 2))
        return plain(runner, *args)

    monkeypatch.setattr(GraphRunner, "replay", again)
    with refused(UsageError, phrase):
        program(x=torch.ones(3, 2))


def test_serialised_programs_keep_their_buffers_to_themselves() -> None:
    program = compiled(threads="serialize")
    key = program.keys[0]
    for use in (lambda: program.inputs(key), lambda: program.replay(key), program.staging):
        with refused(UsageError, "static buffers from outside", 'threads="serialize"', 'threads="refuse"'):
            use()


def test_the_device_is_waited_for_where_the_thread_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    device, waits = acme(), []
    program = compiled(threads="serialize", device=device)
    monkeypatch.setattr(type(device), "synchronize", lambda _: waits.append(1))
    for _ in range(3):
        program(x=torch.ones(2, 2))
    assert len(waits) == 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(program, x=torch.ones(2, 2)).result(20)
    assert len(waits) == 2


class Stateful(nn.Module):
    """Returns its own memory: what it has counted, and what it was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(8, 2))
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.count.add_(1)
        self.last[: x.shape[0]].copy_(x)
        return self.count, self.last[: x.shape[0]], x


@pytest.mark.parametrize(("mode", "rows"), [("compile", 2), ("off", 2), ("compile", 7)])
def test_serialised_results_are_copies_of_the_models_own_memory(mode: Any, rows: int) -> None:
    inputs = {"x": InputSpec(("n", 2), torch.float32)}
    options = {"buckets": [2], "mode": mode, "lowering": "inline", "threads": "serialize"}
    program = compile_with(Stateful(), cpu(), inputs=inputs, **options)
    x = torch.ones(rows, 2)
    count, last, given = program(x=x)
    before = count.item()
    program(x=torch.zeros(rows, 2))
    assert count.item() == before and last.tolist() == [[1.0, 1.0]] * rows
    assert given is x  # the caller's own


@pytest.mark.parametrize("threads", ["refuse", "serialize"])
def test_an_interrupt_leaves_no_turn_taken(threads: Any) -> None:
    program, x, left = compiled(threads=threads), torch.ones(2, 2), 0

    def interrupt(_: FrameType, event: str, __: Any) -> None:
        nonlocal left
        # Where the interpreter runs the handlers of signals: behind a call of C, and as a function of Python begins.
        left -= event in ("c_return", "call")
        if left == 0:
            raise KeyboardInterrupt

    moment = 0
    while not left:  # until a call ends before its moment has come
        left = moment = moment + 1
        with suppress(KeyboardInterrupt):
            sys.setprofile(interrupt)
            program(x=x)
            sys.setprofile(None)
        torch.set_grad_enabled(True)  # torch's own blocks may be interrupted as they end
        assert program(x=x).tolist() == [[2.0, 2.0]] * 2
    assert moment > 10


def test_a_process_forked_during_another_threads_call_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(threads="serialize")
    held = Held(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(program, x=torch.ones(3, 2))
        assert held.inside.wait(20)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # rather than wait for ever
            try:
                program(x=torch.ones(3, 2))
            except UsageError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as said:
            assert "was forked while another thread's call ran" in said.read()
        os.waitpid(child, 0)
        held.go.set()
        assert running.result(20).tolist() == [[2.0, 2.0]] * 3


def test_an_unknown_choice_is_refused() -> None:
    with refused(UsageError, "threads='wait'", "choose one of: refuse, serialize"):
        compiled(threads="wait")
