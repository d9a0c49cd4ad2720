"""core_cpu/aot/lowering.py: a graph becomes one native call with the same numbers, and is compiled once."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import core
from core.common.lowering import UNKEPT, Artifacts, LoweringRequest
from core.common.numerics import judge_pooled
from core.errors import LoweringError
from core_cpu.aot import codegen, lowering, shared_object
from core_cpu.aot.lowering import factors, inductor
from tests.support import compile_with, cpu, refused

X = torch.linspace(-1, 1, 64).view(4, 16)
ROWS = {"x": core.InputSpec(("n", 16), torch.float32)}


class Counter(nn.Module):
    """Writes into a buffer of its own, as a model does into its key/value cache, and returns a view of it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(3, 16))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.seen.index_add_(0, torch.tensor([1]), x[:1])
        return {"y": self.linear(x).relu() * 2 + self.seen.sum(), "row": self.seen[1] * 1.0}


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a compile cache that is on for the test."""
    monkeypatch.setenv("CORE_CACHE", "1")
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def started(model: nn.Module, **options: Any) -> core.Program:
    return compile_with(model, cpu(), inputs=ROWS, buckets=[4], lowering="inductor", **options)


def lowered(graph: fx.GraphModule, *values: Any, **fields: Any) -> Any:
    return inductor(LoweringRequest(graph=graph, example_inputs=values, **fields))


def assert_right(program: core.Program, model: nn.Module, x: Tensor = X) -> None:
    """Judge a call by T1, the buffers of the model put back between."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    exact = {name: value.double() for name, value in state.items()}
    ours = {name: value.clone() for name, value in program(x=x).items()}
    written = model.get_buffer("seen").clone()
    model.load_state_dict(state)
    with torch.no_grad():
        theirs = model(x)
        wide = torch.func.functional_call(model, exact, (x.double(),))
    verdict = judge_pooled(*([each[name] for name in ("y", "row")] for each in (ours, theirs, wide)))
    assert verdict.passed, verdict
    assert torch.equal(written, model.get_buffer("seen"))


@pytest.mark.slow
def test_a_later_start_compiles_nothing_and_serves_other_weights(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_folder / "inductor"))
    cold = started(Counter(), cache=True)
    assert cold.report().counters["kernels"] == 1 and cold.report().notes == ()
    other = Counter(seed=1).eval()
    monkeypatch.setattr(lowering, "_compile", _no_compiler)
    warm = started(other, cache=True)
    assert warm.report().counters == {"traces": 0, "passes": 0, "kernels": 0, "measured": 0, "captures": 1}
    for _ in range(2):  # the second finds what the first one wrote
        assert_right(warm, other)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    (note,) = started(other, cache=True).report().notes
    assert "nothing may be compiled here" in note  # so that what there is was not taken


@pytest.mark.slow
def test_a_graph_that_is_compiled_once_more_is_counted_and_said_at_each_start(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(calls: str) -> str:
        return f"int broken = nothing;\n{alone(calls)}"

    alone = shared_object._without_container
    monkeypatch.setattr(shared_object, "_without_container", broken)
    model = Counter().eval()
    for kernels in (2, 0):
        program = started(model, cache=True)
        (note,) = program.report().notes
        assert note.startswith("a graph is run in torch's own container") and "nothing" in note
        assert program.report().num_kernels == kernels
        assert_right(program, model)


def _no_compiler(*_: Any) -> None:
    raise LoweringError("compiling", found="nothing may be compiled here", remedy="")


COLD = """
import sys
from plugins.cpu.tests.test_aot_lowering import Counter, X, assert_right, started
model = Counter().eval()
program = started(model, cache=True)
assert_right(program, model)
print(program.report().num_kernels, *(name for name in %r if name in sys.modules))
"""
COMPILERS = ("torch._inductor.compile_fx", "torch._inductor.codecache", "torch._functorch.aot_autograd")


@pytest.mark.slow
def test_a_later_process_loads_no_compiler(cache_folder: Path) -> None:
    def start() -> str:
        command = [sys.executable, "-c", COLD % (COMPILERS,)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    assert start() == " ".join(("1", *COMPILERS))
    assert start() == "0"


@pytest.fixture
def custom_ops() -> Iterator[None]:
    library = torch.library.Library("ahead_test", "DEF")
    library.define("scale(Tensor x, float by) -> Tensor")
    library.define("add_to(Tensor(a!) x, int number) -> ()")
    library.impl("scale", lambda x, by: x * by, "CPU")
    library.impl("add_to", lambda x, number: (x.add_(number), None)[1], "CPU")
    torch.library.register_fake("ahead_test::scale", lambda x, by: torch.empty_like(x), lib=library)
    torch.library.register_fake("ahead_test::add_to", lambda x, number: None, lib=library)
    yield
    library._destroy()


@pytest.mark.slow
def test_a_graph_calls_custom_ops_writes_in_place_and_returns_what_it_was_given(custom_ops: None) -> None:
    def fn(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        torch.ops.ahead_test.add_to(cache, 2)
        y = torch.ops.ahead_test.scale(x, 3.0) + cache[:1]
        return y, cache, cache[1:], x

    x, cache, notes = torch.ones(1, 8), torch.zeros(4, 8), list[str]()
    graph = fx.symbolic_trace(fn)
    call = lowered(graph, x, cache, note=notes.append)
    run = call.bind(x, cache)
    first, whole, tail, given = run()
    assert torch.equal(first, torch.full((1, 8), 5.0)) and torch.equal(cache, torch.full((4, 8), 2.0))
    assert whole.data_ptr() == cache.data_ptr() and tail.data_ptr() == cache[1:].data_ptr()
    assert given.data_ptr() == x.data_ptr() and notes == []
    assert torch.equal(run()[0], torch.full((1, 8), 7.0))
    assert torch.equal(first, torch.full((1, 8), 5.0))  # an output is its caller's own
    assert torch.equal(call(x, cache)[0], torch.full((1, 8), 9.0))
    with refused(LoweringError, "input 1 as (torch.float32, (3, 8)", "compiled for (torch.float32, (4, 8)"):
        call(x, cache[1:])


@pytest.mark.slow
def test_tensors_that_a_graph_holds_are_written_where_they_are() -> None:
    held = torch.zeros(4)

    def fn(x: Tensor) -> tuple[Tensor]:
        return (held.add_(x) * 1,)

    graph = fx.symbolic_trace(fn)
    assert any(node.op == "get_attr" for node in graph.graph.nodes)
    x = torch.ones(4)
    call = lowered(graph, x)
    assert call(x)[0].tolist() == [1.0] * 4 and call(x)[0].tolist() == held.tolist() == [2.0] * 4


@pytest.mark.slow
def test_numbers_that_a_graph_is_written_with_are_in_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []

    def open_graph(path: Path, *, contained: bool = False) -> lowering.Graph:
        opened.append(contained)
        return Graph(path, contained=contained)

    Graph = lowering.Graph
    monkeypatch.setattr(lowering, "Graph", open_graph)
    numbers, x = [float(i * i) for i in range(40)], torch.ones(40)
    graph = fx.Graph()
    total = graph.call_function(torch.add, (graph.placeholder("x"), graph.call_function(torch.tensor, (numbers,))))
    graph.output((total,))
    assert lowered(fx.GraphModule({}, graph), x)(x)[0].tolist() == [number + 1 for number in numbers]
    assert lowered(fx.symbolic_trace(lambda x: (x + 1,)), x)(x)[0].tolist() == [2.0] * 40
    assert opened == [True, False, False]  # one without is tried before it is kept


def test_instructions_that_the_kernels_have_are_not_tried_again(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpu_vec_isa import VecAVX512

    tried: list[str] = []
    monkeypatch.setattr(VecAVX512.__mro__[1], "check_build", lambda self, code: bool(tried.append(code)))
    monkeypatch.setattr(codegen, "instructions", lambda: frozenset({"-mavx512f", "-mfma"}))
    isa = VecAVX512()
    with codegen._known_instructions():
        isa._arch_flags = "-mavx512f -mfma"
        assert isa.check_build("known")
        isa._arch_flags = "-mavx512f -mamx-tile"
        assert not isa.check_build("other")
    isa._arch_flags = "-mavx512f"
    assert not isa.check_build("after")
    assert tried == ["other", "after"]


def test_threads_that_compile_at_once_leave_inductor_as_it_was(kernels: None) -> None:
    from torch._inductor.cpu_vec_isa import VecISA

    before, inside, other = VecISA.check_build, threading.Event(), threading.Event()

    def compile_first() -> None:
        with codegen._known_instructions():
            inside.set()
            other.wait(0.2)

    def compile_second() -> None:
        with codegen._known_instructions():
            other.set()
            first.join()

    first, second = threading.Thread(target=compile_first), threading.Thread(target=compile_second)
    first.start()
    inside.wait()
    second.start()
    second.join()
    assert VecISA.check_build is before


class Refusing:
    """Artifacts of a graph that can't be compiled ahead of time."""

    def use(self, factors: Mapping[str, str], make: Any, load: Any) -> Any:
        raise AssertionError("the lowering works in steps")

    def begin(self, factors: Mapping[str, str], make: Any, load: Any) -> Any:
        raise NotImplementedError("an op\nthat nobody knows")


@pytest.mark.slow
def test_a_graph_that_is_refused_goes_the_usual_way_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts: Artifacts = Refusing()
    monkeypatch.setattr("core.compilation.phases.bucket_lowering.UNKEPT", artifacts)
    model = Counter().eval()
    program = started(model, measure=False)  # which keeps its times likewise
    (note,) = program.report().notes
    assert note.startswith("a graph is compiled by Inductor at each start, as AOTInductor refuses it: ")
    assert "NotImplementedError: an op that nobody knows" in note
    assert_right(program, model)


@torch.library.custom_op("test_ahead::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    if x[0, 0] < 0:
        raise ValueError("no negative numbers here")
    return x * 2


@fragile.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.slow
def test_a_run_that_fails_says_so_and_the_next_one_is_right() -> None:
    held = torch.ones(2, 2)
    watched = weakref.ref(held)
    step = lowered(fx.symbolic_trace(lambda x: (fragile(x) + 1,)), torch.ones(2, 2)).bind(held)
    assert torch.equal(step()[0], torch.full((2, 2), 3.0))
    held.fill_(-1.0)
    with pytest.raises(RuntimeError, match="a compiled graph failed"):
        step()
    held.fill_(2.0)  # inputs are read as they are at each run
    assert torch.equal(step()[0], torch.full((2, 2), 5.0))
    del held
    gc.collect()
    assert torch.equal(step()[0], torch.full((2, 2), 5.0)) and watched() is not None  # the step holds them
    del step
    gc.collect()
    assert watched() is None


def test_without_what_runs_graphs_nothing_is_compiled_or_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("no compiler here")

    class Kept:
        def begin(self, *_: Any) -> Any:
            raise AssertionError("artefacts were asked for")

    notes: list[str] = []
    monkeypatch.setattr(lowering, "require", missing)
    monkeypatch.setattr(lowering, "compile_fixed", lambda graph, examples: lambda *args: ("ran", *args))
    step = lowered(fx.symbolic_trace(lambda x: (x + 1,)), X, artifacts=Kept(), note=notes.append)
    assert step(X)[0] == "ran" and "OSError: no compiler here" in notes[0]


@pytest.mark.slow
def test_other_threads_run_during_a_step() -> None:
    """Or a server could answer nobody meanwhile."""
    step = lowered(fx.symbolic_trace(lambda x: (x @ x @ x @ x @ x @ x,)), torch.eye(1024)).bind(torch.eye(1024))
    turns, ended = [0], threading.Event()

    def count() -> None:
        while not ended.wait(0.001):
            turns[0] += 1

    other = threading.Thread(target=count)
    other.start()
    before, start = turns[0], time.perf_counter()
    while time.perf_counter() - start < 0.3:
        step()
    seen = turns[0] - before
    ended.set()
    other.join()
    assert seen > 30  # of 300


def test_what_the_code_depends_on_is_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = factors()
    assert factors() == before and all(before.values())

    def changed() -> set[str]:
        now = factors()
        return {name for name in before if now[name] != before[name]}

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert changed() == {"threads"}
    finally:
        torch.set_num_threads(threads)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert changed() == {"capability"}
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        assert changed() == {"inductor"}
    assert changed() == set()


def test_another_processor_is_told_by_what_it_can_do(tmp_path: Path) -> None:
    def processor(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return lowering._processor(tmp_path / name)

    one = processor("one", "model name\t: Acme 1\nflags\t\t: avx avx2\n\nmodel name\t: Acme 1\nflags\t\t: avx avx2\n")
    assert one.startswith("Acme 1 ") and one == processor("same", "model name : Acme 1\nflags : avx avx2\n")
    assert (
        len({one, processor("more", "model name : Acme 1\nflags : avx avx512\n"), processor("2", "flags : x\n")}) == 3
    )
    assert processor("arm", "Features : sve\n") != processor("older", "Features : asimd\n")
    assert lowering._processor(tmp_path / "absent").strip()


def test_without_a_cache_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = UNKEPT.use({}, lambda folder: (folder / "graph.so").write_bytes(b"code") and None, lambda folder: folder)
    assert seen.parent == tmp_path and list(tmp_path.iterdir()) == []
