"""core_cpu/quantized.py, csrc/integers.h and csrc/quantized_linear.cpp: exact sums of int8 codes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpCall
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from core_cpu import extension
from core_cpu.quantized import MOST_INPUTS, quantized_linear, why_not
from tests.kernel_cases import CPU, DTYPES, check, randn

Plant = Callable[[str, str, CanonicalOp], AbstractContextManager[Any]]

pytestmark = pytest.mark.usefixtures("kernels")


def codes(*shape: int, seed: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def operands(rows: int, columns: int, depth: int, *, zeros: str = "") -> dict[str, Any]:
    """Return codes with scales of 1, so that results are sums. zeros: which sides have zero points, of "xw"."""
    return {
        "x_codes": codes(rows, depth, seed=1),
        "x_scale": torch.ones(rows, 1),
        "w_codes": codes(columns, depth, seed=2),
        "w_scale": torch.ones(columns, 1),
        "bias": None,
        "out_dtype": torch.float32,
        "x_zero_point": codes(rows, 1, seed=3) if "x" in zeros else None,
        "w_zero_point": codes(columns, 1, seed=4) if "w" in zeros else None,
    }


def sums(call: dict[str, Any]) -> Tensor:
    """Return the sums as integers of 64 bits."""
    x, w = (
        call[f"{name}_codes"].long() - (0 if (zero := call[f"{name}_zero_point"]) is None else zero.long())
        for name in ("x", "w")
    )
    return x @ w.T


def asked(**args: Any) -> str | None:
    return why_not(OpCall(op="core::quantized_linear", args=args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_agree_with_the_reference(dtype: torch.dtype) -> None:
    calls = [sample.kwargs for sample in QUANTIZED_LINEAR.samples(dtype, CPU)]
    taken = [call for call in calls if asked(**{"x_zero_point": None, "w_zero_point": None, **call}) is None]
    assert len(taken) == len(calls) - 8  # fp8, and scales of groups and blocks
    check(QUANTIZED_LINEAR, quantized_linear, taken, CPU)


@pytest.mark.cases(3)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("zeros", ["", "x", "w", "xw"])
def test_sums_are_exact(zeros: str, num_threads: int) -> None:
    """Blocks of 1 to 8 rows, several of them, columns that no block divides, depths that end within a unit."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for rows in (*range(1, 10), 19):
            for columns, depth in ((83, 77), (48, 160), (40, 4133)):
                call = operands(rows, columns, depth, zeros=zeros)
                assert torch.equal(quantized_linear(**call), sums(call).float()), (rows, columns, depth)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("zeros", ["", "xw"])
def test_the_largest_sums_are_exact(zeros: str) -> None:
    """Codes of one sign, as many as the kernel takes: these pass 16 bits in pairs, and reach 32 bits in all."""
    depth = MOST_INPUTS // 4 if zeros else MOST_INPUTS
    call = operands(2, 3, depth, zeros=zeros)
    for x, w in ((-128, -128), (127, -128), (-128, 127), (127, 127)):
        call["x_codes"].fill_(x), call["w_codes"].fill_(w)
        for name, code in (("x", x), ("w", w)):
            if zeros:
                call[f"{name}_zero_point"].fill_(127 if code < 0 else -128)
        assert torch.equal(quantized_linear(**call), sums(call).float()), (x, w)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_zero_points_and_bias(dtype: torch.dtype) -> None:
    calls = []
    for rows, zeros in ((1, ""), (7, "xw"), (17, "x")):
        bias = randn(83, dtype=dtype, seed=5, scale=3.0)
        scales = {"x_scale": torch.rand(rows, 1) + 0.1, "w_scale": (torch.rand(83, 1) + 0.1) / 70**2 / 397**0.5}
        call = {**operands(rows, 83, 397, zeros=zeros), **scales, "bias": bias, "out_dtype": dtype}
        calls += [call, call | {"bias": None}]
        if not zeros:
            calls += [call | {"x_scale": torch.tensor(0.3)}, call | {"w_scale": torch.tensor([[1e-5]])}]
    check(QUANTIZED_LINEAR, quantized_linear, calls, CPU)


def test_other_layouts_and_no_rows() -> None:
    call = operands(6, 48, 96)
    wanted = quantized_linear(**call)
    scattered = call | {"x_codes": call["x_codes"].T.contiguous().T, "w_codes": call["w_codes"].T.contiguous().T}
    assert torch.equal(quantized_linear(**scattered), wanted)
    wide = torch.cat([call["w_codes"], call["w_codes"]], 1)
    assert torch.equal(quantized_linear(**call | {"w_codes": wide[:, :96]}), wanted)
    shaped = call | {"x_codes": call["x_codes"].view(2, 3, 96), "x_scale": call["x_scale"].view(2, 3, 1)}
    assert torch.equal(quantized_linear(**shaped), wanted.view(2, 3, 48))
    assert quantized_linear(**call | {"x_codes": call["x_codes"][:0], "x_scale": torch.ones(0, 1)}).shape == (0, 48)


def test_calls_that_the_kernel_does_not_take() -> None:
    call = operands(6, 48, 96, zeros="xw")
    assert asked(**call) is None
    assert "codes are torch.int8 and torch.float8_e4m3fn" in str(
        asked(**{**call, "w_codes": torch.ones(48, 96).to(torch.float8_e4m3fn)})
    )
    assert "out_dtype is torch.float64" in str(asked(**{**call, "out_dtype": torch.float64}))
    assert "x_scale is torch.float64" in str(asked(**{**call, "x_scale": call["x_scale"].double()}))
    assert "w_scale (48, 3) is neither" in str(asked(**{**call, "w_scale": torch.ones(48, 3)}))
    assert "x_scale (3, 1) is neither" in str(asked(**{**call, "x_scale": torch.ones(3, 1)}))
    deep = {**call, "x_codes": call["x_codes"].expand(6, 96)[:, :1].expand(6, MOST_INPUTS + 1)}
    deep["w_codes"] = call["w_codes"][:, :1].expand(48, MOST_INPUTS + 1)
    assert "with zero points may pass int32" in str(asked(**{**deep, "w_codes": deep["w_codes"][:, :MOST_INPUTS]}))
    deep |= {"x_zero_point": None, "w_zero_point": None}
    assert f"sums of {MOST_INPUTS + 1} products" in str(asked(**deep))
    assert asked(**{**deep, "w_codes": deep["w_codes"][:, :MOST_INPUTS]}) is None


MISTAKES = {
    "the last unit left out": ("if (full < units) {\n    int8_t", "if (false) {\n    int8_t"),
    "the first rows for all": ("product.x->numbers.get() + r * units * UNIT", "product.x->numbers.get()"),
    "the first row's sum for all": ("product.x->sums[r + i]);", "product.x->sums[r]);"),
    "a scale for each column": ("const float scale = x.scale_of(r);", "const float scale = x.scale_of(0);"),
    "zero points of x forgotten": ("moved = zero == 0 ? 0 :", "moved = true ? 0 :"),
    "zero points of the weight forgotten": ("- w.zero_of(first + c) * row_sum", ""),
    "the bias of a share's first columns": ("product + bias[first + c]", "product + bias[c]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, plant: Plant) -> None:
    if "sums[r]" in MISTAKES[mistake][1] and not any("VNNI" in word for word in extension._command("", "")):
        pytest.skip("sums of rows are for the products of bytes by avx512_vnni, which this processor has not")
    scales = {"x_scale": torch.rand(11, 1) + 0.1, "w_scale": (torch.rand(413, 1) + 0.1) / 70**2 / 1051**0.5}
    calls = [{**operands(11, 413, 1051, zeros=zeros), **scales, "bias": randn(413, seed=5)} for zeros in ("", "xw")]
    torch.set_num_threads(2)  # shares that begin further on
    try:
        check(QUANTIZED_LINEAR, quantized_linear, calls, CPU)
        with plant(*MISTAKES[mistake], QUANTIZED_LINEAR) as wrong, pytest.raises(AssertionError):
            check(QUANTIZED_LINEAR, wrong.quantized_linear, calls, CPU)
    finally:
        torch.set_num_threads(1)
