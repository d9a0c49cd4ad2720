"""core_cpu/weight_only.py, csrc/codes.h and csrc/weight_only*: int8 and 4-bit weights, judged against fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpCall
from core.common.ops.linear.weight_only import WEIGHT_ONLY_LINEAR
from core.quantization.weights import pack
from core_cpu.row_limits import NO_LIMIT
from core_cpu.row_limits import WEIGHT_ONLY_LINEAR as LIMITS
from core_cpu.weight_only import weight_only_linear, why_not
from tests.kernel_cases import CPU, DTYPES, check, randn

Plant = Callable[[str, str, CanonicalOp, tuple[str, str]], AbstractContextManager[Any]]

pytestmark = pytest.mark.usefixtures("kernels", "unlimited")

LAYOUTS = [(8, None, False), (8, None, True), (8, 128, False), (8, 32, True), (8, 24, True), (8, 1, False)]
LAYOUTS += [(4, None, False), (4, None, True), (4, 128, False), (4, 128, True), (4, 32, False), (4, 24, True)]
LAYOUTS += [(4, 8, False)]
"""Bits of a code, codes of a group (None: a row), whether there are zero points."""


@pytest.fixture
def unlimited() -> Iterator[None]:
    """Let the kernel multiply any number of rows in registers, whatever this machine was measured to do best."""
    before = LIMITS.set(dict.fromkeys(LIMITS.kinds, NO_LIMIT))
    yield
    LIMITS.set(before)


def operands(
    rows: int, columns: int, depth: int, dtype: torch.dtype, layout: tuple[int, int | None, bool]
) -> dict[str, Any]:
    num_bits, size, zeros = layout
    generator = torch.Generator().manual_seed(3)
    low, high = -(1 << (num_bits - 1)), 1 << (num_bits - 1)
    codes = torch.randint(low, high, (columns, depth), dtype=torch.int8, generator=generator)
    groups = 1 if size is None else depth // size
    zero = torch.randint(low, high, (columns, groups), dtype=torch.int8, generator=generator) if zeros else None
    return {
        "x": randn(rows, depth, dtype=dtype),
        "w_codes": pack(codes, 4) if num_bits == 4 else codes,
        "w_scale": randn(columns, groups, seed=1, scale=0.1, shift=1.0) / (high * depth**0.5),
        "w_zero_point": zero,
        "bias": randn(columns, dtype=dtype, seed=2),
        "num_bits": num_bits,
    }


def asked(**args: Any) -> str | None:
    return why_not(OpCall(op="core::weight_only_linear", args=args))


@pytest.mark.cases(3)
@pytest.mark.parametrize("limit", [0, NO_LIMIT], ids=["tiles", "registers"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_agree_with_the_reference(dtype: torch.dtype, limit: int) -> None:
    LIMITS.set(dict.fromkeys(LIMITS.kinds, limit))
    calls = [sample.kwargs for sample in WEIGHT_ONLY_LINEAR.samples(dtype, CPU)]
    taken = [call for call in calls if asked(**{"num_bits": 8, **call}) is None]
    assert len(taken) == len(calls) - 1  # fp8
    check(WEIGHT_ONLY_LINEAR, weight_only_linear, taken, CPU)


@pytest.mark.cases(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows(dtype: torch.dtype, layout: tuple[int, int | None, bool]) -> None:
    """Blocks of 1 to 8 rows, several of them, columns that no block divides, depths that end within a unit."""
    depth = 384 if layout[1] else 397
    for rows in (*range(1, 10), 19):
        check(WEIGHT_ONLY_LINEAR, weight_only_linear, [operands(rows, 83, depth, dtype, layout)], CPU)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_more_rows_than_the_limit_are_tiles_for_torchs_product(layout: tuple[int, int | None, bool]) -> None:
    call = operands(6, 83, 4608, torch.float32, layout)
    own = weight_only_linear(**call)
    LIMITS.set(dict.fromkeys(LIMITS.kinds, 5))
    check(WEIGHT_ONLY_LINEAR, weight_only_linear, [call], CPU)
    assert not torch.equal(own, weight_only_linear(**call))  # sums in another order: so the kernel did not make them
    call["x"] = call["x"][:5]
    assert torch.equal(own[:5], weight_only_linear(**call))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_any_number_of_threads(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for layout in ((8, None, False), (4, 32, True)):
            check(WEIGHT_ONLY_LINEAR, weight_only_linear, [operands(3, 413, 768, torch.bfloat16, layout)], CPU)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_wider_tensors(dtype: torch.dtype) -> None:
    call = operands(5, 48, 128, dtype, (8, 32, True))
    wide = torch.cat([call["w_codes"], call["w_codes"]], 1)[:, 64:192]
    calls = [
        call | {"x": randn(5, 300, dtype=dtype)[:, 64:192], "w_codes": wide},
        call | {"x": randn(128, 5, dtype=dtype).T, "w_scale": call["w_scale"].T.contiguous().T},
        call | {"x": randn(2, 3, 128, dtype=dtype).transpose(0, 1), "w_codes": call["w_codes"].T.contiguous().T},
    ]
    check(WEIGHT_ONLY_LINEAR, weight_only_linear, calls, CPU)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    call = operands(5, 48, 397, torch.bfloat16, (4, None, False))
    call["x"][1, 3], call["x"][3, 395] = float("nan"), float("inf")
    found = weight_only_linear(**call)
    assert found[1].isnan().all() and not found[3].isfinite().any() and found[[0, 2, 4]].isfinite().all()


def test_calls_that_the_kernel_does_not_take() -> None:
    call = operands(6, 48, 96, torch.bfloat16, (4, 24, False))
    assert asked(**call) is None
    assert "x is torch.float64" in str(asked(**{**call, "x": call["x"].double()}))
    assert "w_scale is torch.float16" in str(asked(**{**call, "w_scale": call["w_scale"].half()}))
    scale = torch.ones(48, 8)
    assert "groups of 12 codes do not begin with an int32" in str(asked(**{**call, "w_scale": scale}))
    codes = torch.ones(48, 96).to(torch.float8_e4m3fn)
    eight = {**call, "w_codes": codes, "w_scale": scale, "num_bits": 8}
    assert "codes of 8 bits are torch.float8_e4m3fn" in str(asked(**eight))
    assert asked(**{**eight, "w_codes": codes.to(torch.int8)}) is None


FEWER_ROWS = ("make_integer_sequence<int, MAX_CODED_ROWS>", "integer_sequence<int, 2, 7>")
"""Keeps of the code for blocks of 1 to 8 rows that for 3 and 8, as 11 rows need: a quarter of the time to compile."""
MISTAKES = {
    "none": FEWER_ROWS,
    "the last unit left out": ("if (full < units) {\n    uint8_t", "if (false) {\n    uint8_t"),
    "zero points forgotten": ("const float zero = -static_cast<float>", "const float zero = 0 * static_cast<float>"),
    "the scale of a row's first group": ("return Vec(row[group_]);", "return Vec(row[0]);"),
    "groups within a unit taken in turn": (
        "index_[l] = static_cast<int32_t>(l * (UNIT / WIDTH) / size_)",
        "index_[l] = 0",
    ),
    "a bias for each row": ("product.bias[c + j * apart]", "product.bias[r + i]"),
    "the first rows for all": ("product.x->numbers.get() + r * units * Way::UNIT", "product.x->numbers.get()"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, plant: Plant) -> None:
    layouts = ((8, None, True), (8, 128, False), (4, 32, True), (4, 128, False))
    calls = [operands(11, 83, 1024, torch.bfloat16, layout) for layout in layouts]
    calls.append(operands(11, 83, 1051, torch.bfloat16, (8, None, False)))
    check(WEIGHT_ONLY_LINEAR, weight_only_linear, calls, CPU)
    with plant(*MISTAKES[mistake], WEIGHT_ONLY_LINEAR, FEWER_ROWS) as wrong:
        for kind in range(len(LIMITS.kinds)):
            wrong.limit_rows_weight_only_linear(kind, NO_LIMIT)
        with nullcontext() if mistake == "none" else pytest.raises(AssertionError):
            check(WEIGHT_ONLY_LINEAR, wrong.weight_only_linear, calls, CPU)
