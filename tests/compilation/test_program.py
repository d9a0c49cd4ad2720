"""core/compilation/program.py: what a compiled model does with its inputs, its padding and its outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import core
from core import InputSpec, Program
from core.common.graphs.backend import BoundCallable, CallBackend, GraphKey
from core.common.numerics import Fp64Mode, judge
from core.errors import CaptureError, TraceError, UsageError
from tests.support import Block, Cache, compile_with, cpu, refused

ROWS = {"x": InputSpec(("n", 2), torch.float32)}


def compiled(
    model: Callable[..., Any],
    buckets: Any = (4, 8),
    inputs: Mapping[str, InputSpec] = ROWS,
    lowering: str = "inline",
    **options: Any,
) -> Program:
    options = {"strict": True} | options
    device = cpu(**options.pop("device", {}))
    return compile_with(model, device, inputs=inputs, buckets=buckets, lowering=lowering, **options)


def double(x: Tensor) -> Tensor:
    return x * 2


def rows(count: int, width: int = 2) -> Tensor:
    return torch.arange(1.0, count * width + 1).view(count, width)


class Pooled(CallBackend):
    """Returns the same output tensors at every replay, as captured graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[GraphKey, tuple[Tensor, ...]] = {}

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, Tensor], after_warmup: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        self._outputs[key] = super().capture_one(key, fn, inputs, after_warmup)
        return self._outputs[key]

    def replay(self, key: GraphKey, step: object = None) -> tuple[Tensor, ...]:
        for static, fresh in zip(self._outputs[key], super().replay(key, step), strict=True):
            static.copy_(fresh)
        return self._outputs[key]


@pytest.mark.parametrize(
    ("padding", "first", "after_a_full_call"),
    [
        ("zero", [1, 2, 3, 0, 0, 0], [1, 2, 3, 0, 0, 0]),
        ("sentinel", [1, 2, 3, 7, 7, 7], [1, 2, 3, 7, 7, 7]),
        ("edge", [1, 2, 3, 3, 3, 3], [1, 2, 3, 3, 3, 3]),
        ("keep", [1, 2, 3, 0, 0, 0], [1, 2, 3, 9, 9, 9]),
        # Written once, at capture: rows that a larger call overwrote stay overwritten.
    ],
)
def test_padding_as_it_stands_in_the_buffers(padding: Any, first: list[int], after_a_full_call: list[int]) -> None:
    spec = InputSpec(("n",), torch.int64, padding=padding, value=7 if padding == "sentinel" else 0)
    program = compiled(double, [6], {"x": spec})
    (key,) = program.keys
    program(x=torch.tensor([1, 2, 3]))
    assert program.inputs(key)["x"].tolist() == first
    program(x=torch.full((6,), 9))
    assert program(x=torch.tensor([1, 2, 3])).tolist() == [2, 4, 6]
    assert program.inputs(key)["x"].tolist() == after_a_full_call


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        ("edge", [[1, 2, 2, 2], [3, 4, 4, 4], [3, 4, 4, 4]]),
        ("zero", [[1, 2, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0]]),
        ("sentinel", [[1, 2, 7, 7], [3, 4, 7, 7], [7, 7, 7, 7]]),
    ],
)
def test_padding_of_two_dimensions(padding: Any, expected: list[list[int]]) -> None:
    spec = InputSpec(("n", "m"), torch.float32, padding=padding, value=7 if padding == "sentinel" else 0)
    program = compiled(double, [{"n": 3, "m": 4}], {"x": spec})
    program(x=torch.full((3, 4), 9.0))
    assert torch.equal(program(x=rows(2)), rows(2) * 2)
    assert program.inputs(program.keys[0])["x"].tolist() == expected


def test_copy_must_fill_its_bucket() -> None:
    program = compiled(double, [4], {"x": InputSpec(("n", 2), torch.float32, padding="copy")})
    assert torch.equal(program(x=rows(4)), rows(4) * 2)
    with refused(CaptureError, "input 'x' of shape (3, 2)", "holds (4, 2)", "'copy'", "fill the bucket exactly"):
        program(x=rows(3))


def test_edge_needs_a_row_to_repeat() -> None:
    program = compiled(double, [4], {"x": InputSpec(("n", 2), torch.float32, padding="edge")})
    with refused(CaptureError, "input 'x' of shape (0, 2)", "'edge'", "declare another padding"):
        program(x=rows(0))


def test_an_offset_dimension_pads_with_the_last_start() -> None:
    specs = {"x": ROWS["x"], "starts": InputSpec(("seqs + 1",), torch.int32, padding="edge")}
    program = compiled(lambda x, starts: (x + 1, starts + 0), [{"n": 8, "seqs": 4}], specs)
    _, starts = program(x=rows(5), starts=torch.tensor([0, 2, 5], dtype=torch.int32))
    assert starts.tolist() == [0, 2, 5]
    assert program.inputs(program.keys[0])["starts"].tolist() == [0, 2, 5, 5, 5]


def test_an_input_that_the_model_ignores_is_padded_too() -> None:
    program = compiled(lambda x, ids: x * 2, [4, 8], {**ROWS, "ids": InputSpec(("n",), torch.int64)})
    assert program.report().num_traces == 1
    assert torch.equal(program(x=rows(3), ids=torch.arange(3)), rows(3) * 2)


@pytest.mark.cases(3)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8])
def test_outputs_are_sliced_to_the_real_rows(count: int) -> None:
    program = compiled(lambda x: {"rows": x + 1, "sums": [x.sum(-1)], "fixed": x[:1].new_ones(3), "n": None})
    x = rows(count)
    out = program(x=x)
    assert torch.equal(out["rows"], x + 1) and torch.equal(out["sums"][0], x.sum(-1))
    assert out["fixed"].tolist() == [1, 1, 1] and out["n"] is None


def test_the_smallest_fitting_bucket_runs() -> None:
    program = compiled(double, [2, 4, 8])
    small, middle, large = sorted(program.keys)
    program.inputs(large)["x"].fill_(-1)
    program(x=rows(3))
    assert program.inputs(large)["x"].flatten().tolist() == [1, 2, 3, 4, 5, 6, 0, 0] + [-1] * 8
    assert [key.dims for key in (small, middle, large)] == [(2,), (4,), (8,)]


def test_replay_runs_on_the_buffers_and_slices_nothing() -> None:
    program = compiled(lambda x: (x * 2, x), [4])
    (key,) = program.keys
    buffer = program.inputs(key)["x"]
    buffer.copy_(rows(4))
    with program.serving():
        doubled, same = program.replay(key)
    assert torch.equal(doubled, rows(4) * 2)
    assert same is buffer


def test_an_output_lives_until_the_next_replay_of_its_bucket() -> None:
    program = compiled(double, [4, 8], device={"graph_backend": Pooled})
    first = program(x=rows(4))
    program(x=rows(8))
    assert torch.equal(first, rows(4) * 2)
    program(x=torch.zeros(3, 2))
    assert torch.equal(first[:3], torch.zeros(3, 2))


def test_outputs_do_not_require_grad() -> None:
    program = compiled(Block(), [4], {"x": InputSpec(("n", 16), torch.float32)})
    assert not program(x=rows(3, 16)).requires_grad
    assert not program.replay(program.keys[0]).requires_grad


def test_an_input_that_requires_grad_leaves_no_trace() -> None:
    program = compiled(double, [4])
    x = rows(3).requires_grad_()
    for _ in range(2):
        assert torch.equal(program(x=x), rows(3) * 2)
    assert not program.inputs(program.keys[0])["x"].requires_grad


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("lowering", "dtype"),
    [
        ("inline", torch.float32),
        ("inline", torch.bfloat16),
        pytest.param("inductor", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_results_meet_the_numeric_criterion(lowering: str, dtype: torch.dtype) -> None:
    model = Block().to(dtype)
    x = torch.randn(11, 16, generator=torch.Generator().manual_seed(5)).to(dtype)
    program = compiled(model, [12], {"x": InputSpec(("n", 16), dtype)}, lowering)
    with torch.no_grad():
        eager, exact = model(x), deepcopy(model).double()
        with Fp64Mode():
            reference = exact(x.double())
    verdict = judge(program(x=x), eager, reference)
    assert verdict.passed, verdict
    assert not judge(program(x=x) * 1.02, eager, reference).passed


@pytest.mark.parametrize("lowering", ["inline", pytest.param("inductor", marks=pytest.mark.slow)])
def test_state_is_written_once_per_call(lowering: str) -> None:
    model = Cache()
    specs = {"x": ROWS["x"], "slots": InputSpec(("n",), torch.int64)}
    program = compiled(model, [4], specs, lowering)
    before = int(model.writes)
    assert before >= 1  # capture runs the model on zeros
    for call in range(1, 4):
        out = program(x=rows(3) * call, slots=torch.tensor([5, 9, 7]))
        assert torch.equal(out, rows(3) * call * 2)
        assert int(model.writes) == before + call
    assert torch.equal(model.rows[[5, 9, 7]], rows(3) * 3)
    # Row 0 is where the padding of `slots` points.
    assert model.rows.any(-1).nonzero().flatten().tolist() == [5, 7, 9]


def test_phases_have_buckets_and_models_of_their_own() -> None:
    program = compiled({"decode": double, "prefill": lambda x: x - 1}, {"decode": [2], "prefill": [8]})
    assert torch.equal(program("decode", x=rows(2)), rows(2) * 2)
    assert torch.equal(program("prefill", x=rows(2)), rows(2) - 1)
    assert torch.equal(program("decode", x=rows(1)), rows(1) * 2)
    for phase in ("verify", None):
        with refused(UsageError, f"phase {phase!r}", "decode, prefill", "first argument"):
            program(phase, x=rows(2))
    with refused(CaptureError, "phase 'decode' with n = 3", "the largest is decode[2]"):
        program("decode", x=rows(3))


def test_mode_off_is_the_model_itself() -> None:
    program = compiled(double, {"decode": [4], "prefill": [8]}, mode={"prefill": "off"})
    assert torch.equal(program("prefill", x=rows(9)), rows(9) * 2)  # larger than any bucket
    assert [key.phase for key in program.keys] == ["decode"]
    with refused(UsageError, "inputs ['y']", "declares ['x']"):
        program("prefill", y=rows(2))
    with refused(CaptureError, "replaying prefill[8]", "captured are: decode[4]", "a capture mode"):
        program.replay(GraphKey("prefill", (8,)))
    assert compiled(double, mode="off").report().num_traces == 0


@pytest.mark.parametrize(
    ("inputs", "phrases"),
    [
        ({}, ("inputs []", "declares ['x']", "by name")),
        ({"x": rows(2), "y": rows(2)}, ("inputs ['x', 'y']", "declares ['x']")),
        ({"x": rows(2).double()}, ("input 'x' of torch.float64", "declares torch.float32", "convert it first")),
        ({"x": rows(2, 3)}, ("input 'x' of shape (2, 3)", "declares ('n', 2)", "declared shapes")),
        ({"x": rows(2)[0]}, ("input 'x' of shape (2,)", "declares ('n', 2)")),
    ],
    ids=["missing", "too many", "dtype", "size", "rank"],
)
def test_inputs_that_differ_from_their_declaration(inputs: dict[str, Tensor], phrases: tuple[str, ...]) -> None:
    with refused(UsageError, *phrases):
        compiled(double)(**inputs)


def test_a_wrong_dtype_is_seen_after_a_right_one_too() -> None:
    program = compiled(double)
    program(x=rows(2))
    with refused(UsageError, "input 'x' of torch.int64"):
        program(x=rows(2).long())


def test_equal_names_mean_equal_sizes() -> None:
    program = compiled(lambda x, y: x + y, inputs={"x": ROWS["x"], "y": ROWS["x"]})
    with refused(UsageError, "input 'y' of shape (2, 2)", "and here n = 3", "equal sizes where names are equal"):
        program(x=rows(3), y=rows(2))


def test_no_bucket_is_large_enough() -> None:
    phrases = ("phase 'main' with n = 9", "no bucket is that large; the largest is main[8]", "larger bucket")
    with refused(CaptureError, *phrases):
        compiled(double)(x=rows(9))


def test_an_uncaptured_key_is_refused() -> None:
    program = compiled(double)
    for ask in (program.replay, program.inputs):
        with refused(CaptureError, "replaying main[6]", "captured are: main[8], main[4]", "program.keys"):
            ask(GraphKey("main", (6,)))


def test_a_closed_program_says_so() -> None:
    program = compiled(double)
    with program as entered:
        key = entered.keys[0]
        entered(x=rows(2))
    assert program.keys == ()
    with refused(CaptureError, "calling a program", "it was closed", "compile it again"):
        program(x=rows(2))
    with refused(CaptureError, f"replaying {key}", "it was closed", "compile it again"):
        program.replay(key)
    program.close()


@pytest.mark.slow
def test_two_programs_of_one_model_do_not_meet() -> None:
    model = Block()
    specs = {"x": InputSpec(("n", 16), torch.float32)}
    one, two = compiled(model, [4], specs), compiled(model, [8], specs)
    x = rows(3, 16) / 48
    with torch.no_grad():
        want = model(x)
    first, second = one(x=x), two(x=x)
    torch.testing.assert_close(first, want)
    torch.testing.assert_close(second, want)
    one.close()
    assert torch.equal(two(x=x), second)


def test_the_report_counts_traces_and_captures() -> None:
    report = compiled(double, [1, 2, 4, 8]).report()
    assert (report.num_traces, report.num_captures) == (1, 4)
    assert [trace.buckets for trace in report.traces] == [tuple(GraphKey("main", (n,)) for n in (8, 4, 2, 1))]
    assert [bucket.key.dims[0] for bucket in report.buckets] == [8, 4, 2, 1]
    assert report.static_bytes == 8 * 2 * 4
    document = json.loads(json.dumps(report.to_json()))
    assert document["modes"] == {"main": "compile"} and document["lowering"] == "inline"


def test_a_model_that_writes_its_input_is_refused() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        x[1:].add_(1)
        return x * 2, x

    with refused(TraceError, "writes into its declared input 'x'", "make the tensor a buffer"):
        compiled(model, [4])


def test_an_output_whose_padding_lies_in_between_is_refused_when_padded() -> None:
    program, x = compiled(lambda x: x.t().flatten(), [4]), rows(4)
    assert torch.equal(program(x=x), x.t().flatten())
    with refused(CaptureError, "where padding lies in it is unknown", "fill a bucket exactly"):
        program(x=rows(3))


def test_padding_across_a_branch_on_the_size_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] > 4 else x - 1

    program = compiled(model, [8])
    assert torch.equal(program(x=rows(6)), rows(6) + 1)
    with refused(CaptureError, "padding to main[8]", "branches on a size", "add a bucket of this size"):
        program(x=rows(3))


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.compilation.program.MAX_PLANS", 3)
    program = compiled(lambda x: x * 2, [8])
    for n in range(2, 9):
        assert torch.equal(program(x=rows(n)), rows(n) * 2)
    assert len(program._plans) <= 3


def test_mode_off_checks_inputs_and_needs_no_grad() -> None:
    layer = torch.nn.Linear(2, 2)
    program = core.compile(
        lambda x: layer(x), cpu(), inputs={"x": core.InputSpec(("n", 2), torch.float32)}, buckets=[4], mode="off"
    )
    assert not program(x=torch.ones(9, 2)).requires_grad
    with refused(UsageError, "torch.float64", "convert it first"):
        program(x=torch.ones(4, 2, dtype=torch.float64))
    with refused(UsageError, "input 'x' of shape (4, 3)"):
        program(x=torch.ones(4, 3))


def test_what_is_no_tensor_by_name_is_said_in_our_words() -> None:
    program = compiled(double, [4])
    with refused(UsageError, "2 inputs by place", "it declares x", "program(x)"):
        program(rows(4), rows(4))
    with refused(UsageError, "input 'x'", "a list", "pass a torch tensor"):
        program(x=[[1.0, 2.0]])
    with refused(UsageError, "a ndarray", "pass a torch tensor of torch.float32"):
        program(x=rows(4).numpy())
    with refused(UsageError, "inputs ['phase', 'x']", "pass exactly the declared inputs"):
        program(phase="main", x=rows(4))
