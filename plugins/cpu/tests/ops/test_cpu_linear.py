"""core_cpu/linear.py and csrc/linear.*: few rows by the kernel, judged against fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import core
from core.common.numerics import judge
from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpCall
from core.common.ops.linear.gated import LINEAR
from core.compilation import measuring
from core.compilation.measuring import Measurer
from core_cpu.linear import MOST_ROWS, linear, linear_transposed, why_not, why_not_transposed, widened
from tests.kernel_cases import CPU, DTYPES, OpsSeen, check, randn
from tests.support import compile_with

Plant = Callable[[str, str, CanonicalOp], AbstractContextManager[Any]]

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "x": randn(rows, depth, dtype=dtype),
        "weight": randn(columns, depth, dtype=dtype, seed=1, scale=depth**-0.5),
        "bias": randn(columns, dtype=dtype, seed=2),
    }


def asked(**args: Any) -> str | None:
    return why_not(OpCall(op="core::linear", args=args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_agree_with_the_reference(dtype: torch.dtype) -> None:
    check(LINEAR, linear, [sample.kwargs for sample in LINEAR.samples(dtype, CPU)], CPU)


@pytest.mark.cases(2)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows(dtype: torch.dtype) -> None:
    """Blocks of 1 to 8 rows, several of them, columns and depths that no block divides, and depths in several parts."""
    for rows in (*range(1, 10), 16, 19, 33, 64):
        check(LINEAR, linear, [operands(rows, 83, 77, dtype), operands(rows, 48, 160, dtype)], CPU)
    for rows in (1, 5, 8, 21):
        check(LINEAR, linear, [operands(rows, 83, 4133, dtype)], CPU)


@pytest.mark.cases(2)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_whose_columns_are_runs_of_memory(dtype: torch.dtype) -> None:
    """Any number of rows, columns and depths that no block divides, several shares of columns, parts of a weight."""

    def turned(rows: int, columns: int, depth: int, **changed: Any) -> dict[str, Any]:
        call = operands(rows, columns, depth, dtype)
        return call | {"weight": call["weight"].T.contiguous().T} | changed

    for rows in (*range(1, 10), 16, 19, 64, 65):
        check(LINEAR, linear_transposed, [turned(rows, 83, 77), turned(rows, 64, 160)], CPU)
    calls = [
        turned(1, 9001, 9, bias=None),
        turned(3, 2113, 16),
        turned(8, 1100, 5),
        turned(2, 40, 4133),
        turned(4, 50, 60, weight=randn(60, 99, dtype=dtype, seed=3)[:, 8:58].T),
        turned(6, 50, 60, x=randn(60, 6, dtype=dtype).T, bias=randn(50, 2, dtype=dtype)[:, 1]),
    ]
    check(LINEAR, linear_transposed, calls, CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_in_the_last_row_of_an_odd_depth_stay_infinities(dtype: torch.dtype) -> None:
    weight = randn(9, 40, dtype=dtype)
    weight[8, :3] = float("inf")
    found = linear_transposed(torch.ones(2, 9, dtype=dtype), weight.T, None)
    assert found[:, :3].isposinf().all() and found[:, 3:].isfinite().all()


def test_which_kernel_takes_a_weight() -> None:
    args = operands(5, 48, 96, torch.bfloat16)
    turned = args | {"weight": args["weight"].T.contiguous().T}
    call = OpCall(op="core::linear", args=turned)
    assert asked(**args) is None and why_not_transposed(call) is None
    assert asked(**turned) == "the rows of weight are not one run of memory each"
    other = why_not_transposed(OpCall(op="core::linear", args=args))
    assert other == "the columns of weight are not one run of memory each"
    many = OpCall(op="core::linear", args=turned | {"x": randn(65, 96, dtype=torch.bfloat16)})
    assert "65 rows or more" in (why_not_transposed(many) or "")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_wider_tensors_and_scattered_biases(dtype: torch.dtype) -> None:
    wide, deep = randn(4, 300, dtype=dtype), randn(120, 129, dtype=dtype, seed=3)
    scattered = randn(64, 2, dtype=dtype, seed=4)[:, 1]
    calls = [
        {"x": wide[:, 64:193], "weight": deep[40:104], "bias": scattered},
        {"x": wide[:, :128].T[:, :3].T, "weight": deep[:64, 1:], "bias": None},
        {"x": wide[::2, :129], "weight": deep[::3], "bias": None},
        {"x": wide[:, :258].T.reshape(258, 4)[:129].T, "weight": deep, "bias": None},
    ]
    check(LINEAR, linear, calls, CPU)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    call = operands(5, 48, 96, torch.bfloat16)
    call["x"][1, 3], call["x"][3, 95] = float("nan"), float("inf")
    found = linear(**call)
    assert found[1].isnan().all() and not found[3].isfinite().any() and found[[0, 2, 4]].isfinite().all()


def test_more_rows_than_the_kernel_is_for_are_torchs() -> None:
    call = operands(MOST_ROWS + 1, 48, 4096, torch.float32)
    assert torch.equal(linear(**call), functional.linear(*call.values()))
    call["x"] = call["x"][1:]
    assert not torch.equal(linear(**call), functional.linear(*call.values()))


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows_are_right_however_the_weight_is_divided(dtype: torch.dtype) -> None:
    """Where torch's product of a dtype is slow, parts of the weight are widened for it: several, the last one smaller,
    one of all columns, and one of a depth that takes a part for itself."""
    rows = MOST_ROWS + 1
    calls = [operands(rows, 300, 1024, dtype), operands(rows, 40, 48, dtype), operands(rows, 19, 40_000, dtype)]
    wider, taller = randn(rows, 96, dtype=dtype), randn(120, 48, dtype=dtype)
    calls += [{"x": wider[:, 24:72], "weight": taller[40:80], "bias": None}]
    check(LINEAR, linear, calls, CPU)


def test_calls_that_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    call = operands(MOST_ROWS, 48, 96, torch.bfloat16)
    assert asked(**call) is None
    assert "x is torch.float64" in str(asked(x=call["x"].double(), weight=call["weight"].double(), bias=None))
    assert "not one run of memory" in str(asked(**{**call, "weight": call["weight"].T.contiguous().T}))
    more = {**call, "x": call["x"][None].expand(2, -1, -1)}
    monkeypatch.setattr("core_cpu.linear.widened", lambda: (torch.float16,))
    assert asked(**more) == "x has 128 rows or more, and the kernel is for up to 64"
    assert asked(**{**more, "x": more["x"][:0]}) is None
    assert asked(**{name: value.half() for name, value in more.items()}) is None
    monkeypatch.setattr("core_cpu.linear.widened", lambda: (torch.float16, torch.bfloat16))
    assert asked(**more) is None
    assert "128 rows or more" in str(asked(**{name: value.float() for name, value in more.items()}))


def test_many_rows_are_widened_where_the_condition_says_so() -> None:
    for dtype in DTYPES:
        call = operands(MOST_ROWS + 1, 48, 4096, dtype)
        wide = functional.linear(*(each.float() for each in call.values())).to(dtype)
        assert torch.equal(linear(**call), wide if dtype in widened() else functional.linear(*call.values()))


@pytest.mark.cases(1)
@pytest.mark.parametrize("wins", ["cpu_linear", "torch_linear"])
def test_each_shape_is_timed_against_torchs_product(wins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def least(self: Measurer, runs: dict[str, Any]) -> dict[str, float]:
        return {name: 1.0 if name == wins else 2.0 for name in runs}

    monkeypatch.setattr(Measurer, "_least", least)
    monkeypatch.setattr(measuring, "_KNOWN", {})
    model = Tied(torch.float32).eval().requires_grad_(False)
    trace = started(model, torch.float32, "inline", [], buckets=[3, 8, 100]).report().traces[0]
    timed = {(choice.bucket.dims, choice.implementation) for choice in trace.measured}
    # For more rows than the kernel takes, nothing is timed: it hands them on.
    assert timed == {((3,), wins), ((8,), wins)}


class Tied(nn.Module):
    """An MLP between an embedding and a head that share a weight, beside a product of a weight that is computed."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(96, 64, dtype=dtype)
        self.up, self.down = nn.Linear(64, 160, dtype=dtype), nn.Linear(160, 64, bias=False, dtype=dtype)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(functional.silu(self.up(x)))
        x = functional.linear(x, self.down.weight[:, :64] * scale)
        return functional.linear(x, self.embed.weight)


IDS = torch.arange(3)


def started(model: nn.Module, dtype: torch.dtype, lowering: str, bound: list[Tensor], **options: Any) -> core.Program:
    inputs = {"ids": core.InputSpec(("rows",), torch.int64), "scale": core.InputSpec((64,), dtype)}
    given = {"inputs": inputs, "buckets": [3, 8], "lowering": lowering, "cache": False, **options}
    return compile_with(model, core.select_device("cpu"), relocate=bound.extend, **given)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("dtype", "lowering"),
    [
        (torch.float32, "inline"),
        (torch.bfloat16, "inline"),
        pytest.param(torch.bfloat16, "inductor", marks=pytest.mark.slow),
        pytest.param(torch.float32, "inductor", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_program_reads_the_models_own_weights(dtype: torch.dtype, lowering: str) -> None:
    """So weights that are loaded later count, and nothing is held twice, tied weights included."""
    model, bound = Tied(dtype).eval().requires_grad_(False), list[Tensor]()
    call = {"ids": IDS, "scale": randn(64, dtype=dtype, seed=5)}
    program = started(model, dtype, lowering, bound)
    plain = started(model, dtype, lowering, [], disable_passes=("lift_linear",))
    trace = program.report().traces[0]
    (report,) = (report for report in trace.passes if report.name == "lift_linear")
    assert report.matched == 3
    assert [miss.reason for miss in report.near_misses] == ["mul is no constant that is bound to the graph"]
    chosen = [(choice.implementation, choice.others) for choice in trace.ops if choice.op == "core::linear"]
    assert chosen == [("cpu_linear", ("torch_linear",))] * 3
    weights = {weight.data_ptr() for weight in model.parameters()}
    assert {tensor.data_ptr() for tensor in bound if tensor.ndim == 2} <= weights
    assert sum(tensor.nbytes for tensor in bound) == sum(weight.nbytes for weight in model.parameters())
    for state in (None, Tied(dtype, seed=1).state_dict()):
        if state is not None:
            program.load_weights(state)
        exact = {name: weight.double() for name, weight in model.state_dict().items()}
        wide = torch.func.functional_call(model, exact, (IDS, call["scale"].double()))
        verdict = judge(program(**call), plain(**call).clone(), wide)
        assert verdict.passed, verdict


MISTAKES = {
    "the rest of the depth left out": ("product.depth - k; count > 0", "product.depth - k; count > STEP"),
    "sums of other parts forgotten": ("product.first ? 0.f :", "true ? 0.f :"),
    "a bias for each row": ("product.bias[column]", "product.bias[row]"),
    "the first rows for all": ("product.x + r * product.ldx", "product.x"),
    "rows of a wider weight taken for its own": ("weight.stride(0), bias,", "depth, bias,"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, plant: Plant) -> None:
    whole = operands(21, 83, 4133, torch.bfloat16)
    call = {"x": whole["x"][:, :4099], "weight": whole["weight"][:, :4099], "bias": whole["bias"]}
    check(LINEAR, linear, [call], CPU)
    with plant(*MISTAKES[mistake], LINEAR) as wrong, pytest.raises(AssertionError):
        check(LINEAR, wrong.linear, [call], CPU)


@pytest.mark.parametrize("multiply", [linear, linear_transposed], ids=["rows", "columns"])
def test_many_rows_whose_strides_torch_sees_apart_are_one_product(multiply: Any) -> None:
    call = operands(200, 48, 64, torch.bfloat16)
    call["x"] = call["x"][None].transpose(0, 1)  # (200, 1, 64): torch alone multiplies each row by a copy of the weight
    if multiply is linear_transposed:
        call["weight"] = call["weight"].t().contiguous().t()
    with OpsSeen() as seen:
        multiply(**call)
    assert "aten.bmm.default" not in seen.names
    check(LINEAR, multiply, [call], CPU)
