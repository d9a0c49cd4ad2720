"""core_cpu/aot/codegen.py: Inductor writes the same C++ in a worker as here, and a program runs meanwhile."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, fx

import core
from core.common.ops.canonical import OPS
from core.common.ops.sampling import ARGMAX
from core.common.under_way import UnderWay
from core_cpu.aot import codegen
from core_cpu.aot.direct_calls import DirectCalls
from core_cpu.aot.torch_state import TorchState
from core_cpu.linear import linear
from tests.support import compile_with

pytestmark = pytest.mark.usefixtures("kernels")

X, W = torch.linspace(-1, 1, 64).view(4, 16), torch.linspace(-1, 1, 256).view(16, 16)
WAIT_S = 300.0


def calls(x: Tensor, weight: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    return (torch.nn.functional.silu(linear(x, weight, None)) + row, x.new_ones(4) + x.sum(1))


def sources(folder: Path) -> str:
    """Return the C++ below a folder, without the names of the folder and of files, which are digests of it too."""
    texts = [path.read_text().replace(str(folder), "") for path in folder.rglob("*.cpp")]
    assert texts
    return "\n".join(sorted(re.sub(r"\bc[a-z0-9]{51}\b", "name", text) for text in texts))


def ended(work: UnderWay[Any]) -> Any:
    """Ask again and again, as the thread of a program does."""
    while not work.is_done:
        work.advance()
    return work.finish()


@pytest.fixture
def no_workers() -> Iterator[None]:
    """End the workers of the test."""
    yield
    codegen._WORKERS.end()
    assert codegen._WORKERS._pool is None


@pytest.mark.slow
def test_a_job_that_was_pickled_writes_the_same_code(tmp_path: Path) -> None:
    graph, examples = fx.symbolic_trace(calls), [X, W, W[0]]
    declarations = DirectCalls(graph).declarations
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    codegen.generate(graph, examples, declarations, str(here))
    job = pickle.loads(pickle.dumps(codegen._Job.of(graph, examples, declarations, str(there))))
    assert job.memories == (X.untyped_storage().nbytes(), W.untyped_storage().nbytes())  # the row lies in the weight
    job.run()
    assert sources(there) == sources(here) and next(iter(declarations.values())).split("(")[0] in sources(here)


def test_a_graph_that_calls_functions_of_python_can_be_told_to_a_worker(tmp_path: Path) -> None:
    """References stand where no implementation takes a call, as for the choice of tokens in a served step."""
    targets = [*(op.reference for op in OPS), *(each.fn for each in core.select_device("cpu").ops)]
    graph = fx.Graph()
    for target in targets:
        graph.call_function(target)
    graph.output(())
    pickle.dumps(codegen._Job.of(fx.GraphModule({}, graph), [], {}, str(tmp_path)))
    assert [node.target for node in graph.nodes][:-1] == targets  # as they were
    graph = fx.Graph()
    chosen = graph.call_function(ARGMAX.reference, (graph.placeholder("logits"),))
    graph.output((graph.call_function(torch.add, (chosen, 1)),))
    pickle.loads(pickle.dumps(codegen._Job.of(fx.GraphModule({}, graph), [X], {}, str(tmp_path)))).run()
    assert "argmax" in sources(tmp_path)


def test_a_graph_that_no_worker_can_be_told_of_is_compiled_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(lambda x: x, (graph.placeholder("x"),)),))
    monkeypatch.setattr(codegen, "generate", lambda *given: ["here"])
    with caplog.at_level("INFO", "core.cpu"):
        work = UnderWay(codegen.generate_apart(fx.GraphModule({}, graph), [X], {}, str(tmp_path)))
        assert ended(work) == ["here"]
    assert "can't be told to a worker" in caplog.text and "<lambda>" in caplog.text


def summed(x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    return (x.index_add(0, rows, x),)


OTHERWISE: dict[str, Any] = {
    "num_threads": 1 if torch.get_num_threads() > 1 else 2,
    "default_dtype": torch.float64,
    "matmul_precision": "high",
    "deterministic": True,
    "warn_only": True,
    "fill_uninitialized_memory": False,
    "mkldnn": False,
}


@pytest.fixture
def state() -> Iterator[TorchState]:
    """Torch's switches as they are, and put back afterwards."""
    before = TorchState.read()
    yield before
    before.apply()
    assert TorchState.read() == before


def test_a_worker_gets_every_switch_of_torch(state: TorchState) -> None:
    other = TorchState(**OTHERWISE)
    other.apply()
    assert TorchState.read() == other
    assert all(getattr(other, name) != getattr(state, name) for name in OTHERWISE)


def test_a_worker_writes_deterministic_code_where_that_is_asked(tmp_path: Path, state: TorchState) -> None:
    graph, examples = fx.symbolic_trace(summed), [X, torch.tensor([0, 1, 1, 0])]
    replace(state, deterministic=True).apply()
    job = pickle.dumps(codegen._Job.of(graph, examples, {}, str(tmp_path)))
    state.apply()
    pickle.loads(job).run()
    assert "index_put" in sources(tmp_path)  # else Inductor adds by a loop of its own


def test_where_a_worker_fails_this_process_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(job: object) -> None:
        raise OSError("no processes are left")

    monkeypatch.setattr(codegen._WORKERS, "submit", refuse)
    monkeypatch.setattr(codegen, "generate", lambda *given: ["here"])
    with caplog.at_level("INFO", "core.cpu"):
        assert ended(UnderWay(codegen.generate_apart(fx.symbolic_trace(calls), [X, W, W[0]], {}, str(tmp_path)))) == [
            "here"
        ]
    assert "no processes are left" in caplog.text


def test_a_job_that_is_given_up_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: Future[list[str]] = Future()
    monkeypatch.setattr(codegen._WORKERS, "submit", lambda job: given)
    folder = tmp_path / "made"
    folder.mkdir()
    graph = fx.symbolic_trace(calls)
    work = UnderWay(codegen.generate_apart(graph, [X, W, W[0]], {}, str(folder)))
    work.advance()
    work.abandon()
    assert folder.exists()  # the worker writes there
    given.set_result([])
    assert not folder.exists()
    assert codegen._Job.of(graph, [X, W, W[0]], {}, str(folder)).run() == [] and not folder.exists()


class Pool:
    """Workers, of which the first ones die."""

    made: ClassVar[list[Pool]] = []

    def __init__(self, num_workers: int) -> None:
        self.made.append(self)
        self.ended = False

    def submit(self, run: object) -> Future[list[str]]:
        if self is self.made[0]:
            raise RuntimeError("Attempting to use a closed pool")
        done: Future[list[str]] = Future()
        done.set_result(["there"])
        return done

    def shutdown(self) -> None:
        self.ended = True


def test_workers_that_died_are_replaced_and_idle_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_worker.subproc_pool.SubprocPool", Pool)
    monkeypatch.setattr(codegen, "_IDLE_S", 0.0)
    monkeypatch.setattr(Pool, "made", [])
    workers, job = codegen._Workers(), cast("codegen._Job", SimpleNamespace(run=None))
    with pytest.raises(RuntimeError, match="closed pool"):
        workers.submit(job)
    assert workers.submit(job).result() == ["there"] and len(Pool.made) == 2
    assert workers._idle is not None  # the failed job does not count as one under way
    workers._idle.join()
    assert Pool.made[1].ended and workers._pool is None


def test_a_worker_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen._WORKERS, "submit", lambda job: Future())
    monkeypatch.setattr(codegen, "_LONGEST_S", 0.05)
    monkeypatch.setattr(codegen, "generate", lambda *given: ["here"])
    work = codegen.generate_apart(fx.symbolic_trace(calls), [X, W, W[0]], {}, str(tmp_path))
    assert ended(UnderWay(work)) == ["here"]


@pytest.mark.slow
def test_a_worker_writes_the_same_code(tmp_path: Path, no_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, examples = fx.symbolic_trace(calls), [X, W, W[0]]
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    codegen.generate(graph, examples, {}, str(here))
    monkeypatch.setattr(codegen, "generate", None)  # it is not done here
    ended(UnderWay(codegen.generate_apart(graph, examples, {}, str(there))))
    assert sources(there) == sources(here)


@pytest.mark.slow
def test_a_program_answers_right_before_and_after_it_is_compiled(no_workers: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    inputs = {"input": core.InputSpec(("n", 16), torch.float32)}
    expected = model(X).detach()
    with compile_with(model, "cpu", inputs=inputs, buckets=[1, 4], lowering="inductor", background=True) as program:
        before = program(input=X).clone()
        assert program.report().pending and sum(program.report().interim.values()) == 3
        assert program.wait_compiled(WAIT_S) and not program.report().notes
        after = program(input=X).clone()
        assert program.report().num_kernels >= 2 and sum(program.report().interim.values()) >= 3
        for found in (before, after):
            torch.testing.assert_close(found, expected)


_LEAVES = """
import glob, torch, core
model = torch.nn.Linear(16, 16)
inputs = {"input": core.InputSpec(("n", 16), torch.float32)}
options = core.CompileOptions(background=True)
program = core.compile(model, "cpu", inputs=inputs, buckets=[1, 2, 4, 8], lowering="inductor", options=options)
while not (children := [pid for path in glob.glob("/proc/self/task/*/children") for pid in open(path).read().split()]):
    program(input=torch.ones(1, 16))
print(*children)
"""


@pytest.mark.slow
def test_a_process_that_ends_while_it_compiles_leaves_nothing(no_workers: None) -> None:
    done = subprocess.run([sys.executable, "-c", _LEAVES], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0 and done.stderr == ""
    children = done.stdout.split()
    assert children and not any(Path("/proc", child).exists() for child in children)
