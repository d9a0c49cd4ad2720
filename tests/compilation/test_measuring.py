"""core/compilation/measuring.py: of several implementations of an op, the fastest runs, in each bucket anew."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import InputSpec
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.declaration import declared_ops
from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.norm.norms import rms_norm
from core.compilation import measuring
from core.compilation.measuring import Measurer
from core.compilation.program import Program
from core.compilation.report import TraceReport
from core.compilation.timed_calls import AlikeCalls, Form
from core.device import Device
from core.errors import LoweringError, UsageError
from tests.recording import acme
from tests.support import Norm, compile_with, cpu, refused, rewrite

OP, SLOW_S = "core::rms_norm", 0.003
ran: list[tuple[str, int]] = []
"""Implementations that ran, each with the rows it was given."""


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test time for itself: a process keeps what it has timed."""
    monkeypatch.setattr(measuring, "_KNOWN", {})


def steady(*args: Any, **kwargs: Any) -> Tensor:
    """Take a while, whatever the size."""
    ran.append(("steady", args[0].shape[0]))
    time.sleep(SLOW_S)
    return rms_norm(*args, **kwargs)


def growing(*args: Any, **kwargs: Any) -> Tensor:
    """Be quick for few rows alone."""
    ran.append(("growing", args[0].shape[0]))
    time.sleep(0.0 if args[0].shape[0] <= 4 else 3 * SLOW_S)
    return rms_norm(*args, **kwargs)


def failing(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("no such kernel")


def implementation(fn: Any, **fields: Any) -> OpImplementation:
    return OpImplementation(op=OP, name=fn.__name__, fn=fn, **fields)


STEADY, GROWING, FAILING = map(implementation, (steady, growing, failing))


class Norms(nn.Module):
    """Two norms of which the calls are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        once = torch.ops.core.rms_norm(x, self.weight, 1e-5)
        return torch.ops.core.rms_norm(once * 2, self.weight, 1e-5)


class Others(Norms):
    """Another model, whose calls are like those of `Norms`."""

    def forward(self, x: Tensor) -> Tensor:
        once = torch.ops.core.rms_norm(x.abs(), self.weight, 1e-5)
        return torch.ops.core.rms_norm(once, self.weight, 1e-5)


def compiled(device: Device, model: nn.Module | None = None, **options: Any) -> Program:
    ran.clear()
    inputs = {"x": InputSpec(shape=("rows", 64), dtype=torch.float32)}
    options = {"lowering": "inline", **options}
    return compile_with(model or Norms(), device, inputs=inputs, buckets={"rows": [2, 32]}, **options)


def trace_of(program: Program) -> TraceReport:
    (trace,) = program.report().traces
    return trace


def served(program: Program, rows: int) -> set[str]:
    """Run a call, compare it with the model's own, and return the names of the implementations that it took."""
    x = torch.randn(rows, 64)
    ran.clear()
    result = program(x=x)
    names = {name for name, _ in ran}
    assert torch.equal(result, Norms()(x))
    return names


def test_each_bucket_runs_what_is_fastest_there() -> None:
    program = compiled(cpu(ops=(STEADY, GROWING)))
    few, many = sorted(trace_of(program).measured, key=lambda each: each.bucket)
    assert (few.bucket.dims, few.implementation) == ((2,), "growing")
    assert (many.bucket.dims, many.implementation) == ((32,), "steady")
    assert len(few.nodes) == 2 and [name for name, _ in few.times_us] == ["steady", "growing"]
    assert program.report().num_measured == 2  # the two calls are alike
    assert served(program, 2) == {"growing"} and served(program, 30) == {"steady"}


def test_graphs_are_timed_where_the_device_captures_them() -> None:
    assert "full" in acme().capabilities.modes
    program = compiled(acme(ops=(STEADY, GROWING)))
    assert program.report().num_measured == 2
    timed = [call for call in ran if call == ("steady", 32)]
    assert len(timed) < 12  # warm-ups and captures, of the timing and of the program: replays run no Python


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"measure": False}, {"steady"}),
        ({"providers": {OP: "growing"}}, {"growing"}),
        ({"providers": {OP: "reference"}}, set()),
    ],
    ids=["not measured", "named", "reference"],
)
def test_nothing_is_timed_where_it_is_decided(options: Any, expected: set[str]) -> None:
    program = compiled(cpu(ops=(STEADY, GROWING)), **options)
    assert trace_of(program).measured == () and program.report().num_measured == 0
    assert served(program, 2) == served(program, 32) == expected


def test_one_that_takes_the_call_is_not_timed() -> None:
    refuses = implementation(growing, condition=lambda call: "not today")
    program = compiled(cpu(ops=(STEADY, refuses)))
    assert program.report().num_measured == 0 and served(program, 2) == {"steady"}


@pytest.mark.parametrize("ops", [(STEADY, FAILING), (FAILING, STEADY)], ids=["second", "preferred"])
def test_one_that_fails_is_not_used_and_the_report_says_so(ops: Any) -> None:
    program = compiled(cpu(ops=ops))
    assert any("failing" in note and "no such kernel" in note for note in program.report().notes)
    assert served(program, 2) == {"steady"}


class Layers(nn.Module):
    """Norms alike, each with a weight of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        made = (nn.Parameter(torch.linspace(0.5, 1.5, 64) + layer, requires_grad=False) for layer in range(count))
        self.weights = nn.ParameterList(made)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.ops.core.rms_norm(x, weight, 1e-5)
        return x


def test_short_calls_are_timed_with_the_weights_of_all_layers() -> None:
    """With one weight again and again, each call but the first would find it in the device's caches."""
    weights: list[int] = []

    def seen(*args: Any, **kwargs: Any) -> Tensor:
        weights.append(args[1].data_ptr())
        return rms_norm(*args, **kwargs)

    model = Layers(5)
    own = [weight.data_ptr() for weight in model.weights]
    real = Measurer.choose

    def choose(self: Measurer, *args: Any, **kwargs: Any) -> Any:
        weights.clear()
        found = real(self, *args, **kwargs)
        during.extend(weights)
        return found

    during: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Measurer, "choose", choose)
        compiled(cpu(ops=(implementation(seen), STEADY)), model)
    assert any(during[start : start + 5] == own for start in range(len(during)))


class Lifted(nn.Module):
    """A norm that a pass makes an op of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x)
        return found


class Mixed(Layers):
    """Norms by a weight of the program, and by one that the model computes."""

    def __init__(self, *, computed_first: bool) -> None:
        super().__init__(2)
        self.computed_first = computed_first

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            computed = (number == 0) == self.computed_first
            x = torch.ops.core.rms_norm(x, x[0] * 0 + 1 if computed else weight, 1e-5)
        return x


@pytest.mark.parametrize("computed_first", [False, True])
def test_calls_are_alike_only_where_the_same_arguments_are_the_programs_own(computed_first: bool) -> None:
    program = compiled(cpu(ops=(STEADY, GROWING)), Mixed(computed_first=computed_first))
    assert not program.report().notes and program.report().num_measured == 4
    assert [len(each.nodes) for each in trace_of(program).measured] == [1, 1, 1, 1]


def test_one_slow_round_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is faster, but its first round is disturbed."""
    seconds = {"a": [0.0010] * 9, "b": [0.0008, 0.0030, *[0.0008] * 8]}  # the first of each finds the count
    monkeypatch.setattr(Measurer, "_seconds", lambda self, run, count: seconds[run].pop(0))
    measurer = Measurer(cpu(), keep=None, note=None)  # type: ignore[arg-type]
    runs: Any = {"a": "a", "b": "b"}
    assert measurer._least(runs) == {"a": 0.0010, "b": 0.0008}
    seconds |= {"a": [0.0010] * 9, "b": [0.0100] * 9}
    measurer._least(runs)
    assert len(seconds["b"]) == 9 - 3  # the count, and two rounds


def test_what_the_program_would_index_by_is_stood_in_for() -> None:
    """Attention by the program's own slots would write into its cache."""
    calls = AlikeCalls({"slot_mapping": Form(dtype=torch.int64, shape=(3,), stride=(1,))})
    calls.add(None, {"slot_mapping": torch.full((3,), 7)})  # type: ignore[arg-type]
    op: Any = SimpleNamespace(indices=lambda call: {"slot_mapping": torch.zeros(3, dtype=torch.int64)})
    (made,) = calls.made(op, torch.device("cpu"))
    assert not made["slot_mapping"].any()


def test_long_calls_are_timed_one_at_a_time() -> None:
    program = compiled(cpu(ops=(STEADY, implementation(growing))), Layers(5))
    assert program.report().num_measured == 2
    for rows in (2, 32):  # besides the program's own warm-up, which is one call of each layer
        assert ran.count(("steady", rows)) <= measuring._ROUNDS + 3 + 2 * 5


def test_a_timed_that_raises_is_told() -> None:
    def broken(call: OpCall) -> str | None:
        raise ValueError("boom")

    with refused(LoweringError, "'growing'", "its 'timed' raised ValueError: boom", "mend 'timed'"):
        compiled(cpu(ops=(STEADY, implementation(growing, timed=broken))))


@pytest.mark.slow
def test_another_slack_or_another_word_on_timing_is_another_entry_of_the_cache(cache_folder: Path) -> None:
    def state(**fields: Any) -> str:
        device = cpu(ops=(implementation(growing, **fields), STEADY))
        return compiled(device, cache=True, measure=False).report().cache.state

    assert [state(), state(slack=4.0), state(timed=lambda call: "no"), state()] == ["miss", "miss", "miss", "hit"]


def test_what_an_implementation_says_not_to_time_is_not_timed() -> None:
    asked: list[tuple[int, ...]] = []

    def few_rows(call: OpCall) -> str | None:
        asked.append(tuple(call.args["x"].shape))
        assert call.args["x"].device.type == "cpu"
        return None if call.args["x"].shape[0] <= 4 else "it is for few rows"

    program = compiled(cpu(ops=(STEADY, implementation(growing, timed=few_rows))))
    (measured,) = trace_of(program).measured
    assert measured.bucket.dims == (2,) and measured.implementation == "growing"
    assert set(asked) == {(2, 64), (32, 64)} and program.report().num_measured == 1
    assert served(program, 30) == {"steady"}


def test_what_gives_accuracy_up_runs_only_where_it_is_asked_for() -> None:
    loose = implementation(growing, slack=4.0)
    device = cpu(ops=(loose, STEADY))
    program = compiled(device)
    assert program.report().num_measured == 0 and served(program, 2) == {"steady"}
    named = compiled(device, providers={OP: "growing"})
    assert named.report().num_measured == 0 and served(named, 2) == {"growing"}
    nothing = rewrite(lambda module: [], stage="aten")
    device = cpu(ops=(loose,), passes=(*cpu().passes, nothing))
    later = compiled(device, Lifted(), providers={OP: "growing"})  # which puts back first what nobody implements
    assert {choice.implementation for choice in trace_of(later).ops} == {"growing"}
    alone = compiled(cpu(ops=(loose,)))
    assert {choice.implementation for choice in trace_of(alone).ops} == {"reference"} and served(alone, 2) == set()


def test_times_are_kept_on_disk(cache_folder: Path) -> None:
    device = cpu(ops=(STEADY, GROWING))
    first = compiled(device, cache=True)
    assert first.report().num_measured == 2
    again = compiled(device, cache=True)  # the graphs come from the cache, and what was chosen with them
    assert again.report().cache.state == "hit" and again.report().num_measured == 0
    assert trace_of(again).measured == trace_of(first).measured
    assert served(again, 2) == {"growing"} and served(again, 32) == {"steady"}
    other = compiled(device, Others(), cache=True)
    assert other.report().cache.state == "miss" and other.report().num_measured == 0
    assert trace_of(other).measured[0].times_us == trace_of(first).measured[0].times_us


def test_timing_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MAX_SECONDS", 1e-6)
    program = compiled(cpu(ops=(STEADY, GROWING)))
    assert len(trace_of(program).measured) == 1
    assert any("timing others took" in note for note in program.report().notes)
    (timed,) = (each.bucket.dims[0] for each in trace_of(program).measured)
    (other,) = {2, 32} - {timed}
    assert served(program, other) == {"steady"}


def test_what_the_user_names_has_to_be_there() -> None:
    gone = implementation(growing, missing="fastlib is not installed: pip install fastlib")
    device = cpu(ops=(STEADY, gone))
    with refused(UsageError, "'growing'", "fastlib is not installed", "steady, reference"):
        compiled(device, providers={OP: "growing"})
    with refused(UsageError, "'other'", "the device has none", "steady, reference"):
        compiled(device, providers={OP: "other"})
    for name in ("steady", "reference"):
        with refused(UsageError, "'core::rms'", "no canonical op", OP):
            compiled(device, providers={"core::rms": name})
    assert served(compiled(device), 2) == {"steady"}


def test_a_call_that_the_named_one_refuses_goes_to_the_others_and_is_told() -> None:
    refuses = implementation(growing, condition=lambda call: "not today")
    program = compiled(cpu(ops=(STEADY, refuses)), providers={OP: "growing"})
    assert served(program, 2) == {"steady"}
    (note,) = (note for note in program.report().notes if "as asked" in note)
    assert "2 calls of core::rms_norm" in note and "not today" in note


@pytest.mark.parametrize("op", [ATTENTION, ROTARY_ATTENTION], ids=lambda op: op.name)
def test_indices_of_a_step_fit_the_call_and_leave_its_tensors_alone(op: Any) -> None:
    assert op.indices is not None
    for sample in op.samples(torch.float32, torch.device("cpu")):
        call = {"max_query_len": 0} | dict(sample.kwargs)
        before = {name: v.clone() for name, v in call.items() if isinstance(v, Tensor) and not v.is_floating_point()}
        made = op.indices(call)
        assert all(torch.equal(call[name], was) for name, was in before.items())
        assert {name: (v.dtype, v.shape) for name, v in made.items()} == {
            name: (call[name].dtype, call[name].shape) for name in made
        }
        new, num_blocks = made["query_starts"].diff(), call["key_cache"].shape[0]
        longest = call["block_table"].shape[1] * call["key_cache"].shape[1]
        assert (new >= 0).all() and new.sum() <= call["query"].shape[0]
        assert (made["seq_lens"] >= new).all() and (made["seq_lens"] <= new.clamp(min=longest)).all()
        assert (made["block_table"] >= 0).all() and (made["block_table"] < num_blocks).all()
        assert not made["slot_mapping"].any()  # the null block


def test_every_op_with_tensors_that_index_says_how() -> None:
    index = {"block_table", "indices", "ends", "slot_mapping"}
    indexing = [op for op in declared_ops().values() if {a.name for a in op.overload._schema.arguments} & index]
    assert ATTENTION in indexing
    assert [op.name for op in indexing if op.qualified_name.startswith("core::") and op.indices is None] == []


def test_the_programs_own_tensors_are_used_and_its_integers_not_written() -> None:
    weights: list[int] = []

    def seen(*args: Any, **kwargs: Any) -> Tensor:
        weights.append(args[1].data_ptr())
        return rms_norm(*args, **kwargs)

    model = Norms()
    compiled(cpu(ops=(OpImplementation(op=OP, name="seen", fn=seen), GROWING)), model)
    assert weights and set(weights) == {model.weight.data_ptr()}


def test_collectives_are_not_timed() -> None:
    """Each process would decide for itself, and wait for others that make another call."""

    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.core.all_reduce(x, "")

    both = [OpImplementation(op="core::all_reduce", name=name, fn=lambda x, group: x.clone()) for name in ("a", "b")]
    program = compiled(cpu(ops=tuple(both)), Sums())
    (choice,) = trace_of(program).ops
    assert (choice.implementation, choice.others) == ("a", ("b",))
    assert program.report().num_measured == 0 and trace_of(program).measured == ()


def test_what_is_not_installed_is_named_also_behind_the_preferred_one() -> None:
    gone = implementation(growing, missing="fastlib is not installed")
    for choice in trace_of(compiled(cpu(ops=(STEADY, gone)))).ops:
        assert choice.implementation == "steady" and choice.refused == (("growing", "fastlib is not installed"),)
