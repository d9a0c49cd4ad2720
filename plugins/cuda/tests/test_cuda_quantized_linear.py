"""Products of fp8 codes: core_cuda/ops/linear/{quantized,scaled}.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.common.numerics import judge
from core.common.ops.implementation import OpCall
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from tests.kernel_cases import CPU, moved, randn

pytest.importorskip("triton", reason="needs triton")

from core_cuda.ops import launching
from core_cuda.ops.linear import quantized
from core_cuda.ops.linear.quantized import (
    FAST_SLACK,
    candidates,
    library_timed,
    multiply,
    quantized_linear,
    quantized_linear_fast,
    quantized_linear_library,
    why_not,
    why_not_fast,
)
from core_cuda.ops.linear.scaled import WAYS
from core_cuda.ops.linear.skinny_configs import SkinnyConfig

FP8 = torch.float8_e4m3fn
ROWS = (1, 5, 40, 130)
ORDER = ("x_codes", "x_scale", "w_codes", "w_scale", "bias")


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, seed=seed, scale=30.0).to(FP8)


def call(rows: int, columns: int = 96, depth: int = 256, *, seed: int = 0, **changes: Any) -> dict[str, Any]:
    operands = {
        "x_codes": codes(rows, depth, seed=seed),
        "x_scale": torch.rand(rows, 1) * 0.01 + 0.005,
        "w_codes": codes(columns, depth, seed=seed + 1),
        "w_scale": torch.rand(columns, 1) * 0.01 + 0.005,
        "bias": None,
        "out_dtype": torch.bfloat16,
    }
    return operands | changes


def exact(args: dict[str, Any]) -> torch.Tensor:
    wide = {
        n: v.double() if isinstance(v, torch.Tensor) and v.dtype not in (FP8, torch.int8) else v
        for n, v in args.items()
    }
    return QUANTIZED_LINEAR.reference(**wide | {"out_dtype": torch.float64})


def judged(found: torch.Tensor, args: dict[str, Any], slack: float = 1.0) -> bool:
    reference = QUANTIZED_LINEAR.reference(**args)
    assert found.dtype == reference.dtype and found.shape == reference.shape and found.stride() == reference.stride()
    return bool(judge(found.cpu(), reference, exact(args), slack=slack).passed)


def run(args: dict[str, Any], device: torch.device, kernel: Any = quantized_linear) -> torch.Tensor:
    there = moved(args, device)
    operands = [there.pop(name) for name in ORDER]
    result: torch.Tensor = kernel(*operands, **there)
    return result


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(rows: int, out_dtype: torch.dtype, kernel_device: torch.device) -> None:
    if kernel_device == CPU and rows > 32:
        pytest.skip("torch's own products of fp8 need a GPU")
    bias = randn(96, dtype=out_dtype, seed=7)
    for changes in ({}, {"bias": bias}, {"x_scale": torch.tensor(0.01)}, {"w_scale": torch.tensor([[0.02]])}):
        args = call(rows, out_dtype=out_dtype, **changes)
        assert judged(run(args, kernel_device), args), changes


@pytest.mark.parametrize("code", [FP8, torch.int8], ids=str)
def test_scales_that_lie_apart(code: torch.dtype, kernel_device: torch.device) -> None:
    args = call(5, x_codes=codes(5, 256).to(code), w_codes=codes(96, 256, seed=1).to(code))
    there = moved(args, kernel_device)
    for name in ("x_scale", "w_scale"):
        between = torch.stack((there[name], torch.full_like(there[name], float("nan"))), 1)[:, 0]
        found = quantized_linear(*((there | {name: between})[each] for each in ORDER), out_dtype=torch.bfloat16)
        assert judged(found.cpu(), args), name


@pytest.mark.parametrize("kernel", [quantized_linear_library, quantized_linear_fast], ids=lambda k: k._opname)
def test_the_other_kernels(kernel: Any, kernel_device: torch.device) -> None:
    if kernel_device == CPU:
        pytest.skip("torch's own products of fp8 need a GPU")
    slack = FAST_SLACK if kernel == quantized_linear_fast else 1.0
    for rows in ROWS:
        for columns, depth in ((96, 256), (64, 4096)):
            args = call(rows, columns, depth)
            found = run(args, kernel_device, kernel)
            assert judged(found, args, slack), (rows, columns, depth)
            assert not judged(found * 1.02, args, slack)


def test_what_is_timed_depends_on_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 multiprocessors: up to 4 tiles of 128 columns and rows leave half of them idle."""

    def timed(rows: int, columns: int = 512) -> bool:
        return library_timed(OpCall(op="core::quantized_linear", args=call(rows, columns))) is None

    def kernels(rows: int) -> list[str]:
        return [choose(rows, 512, 256).kernel for choose in (quantized._choose, quantized._other_library)]

    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 8)
    assert timed(5) and timed(512) and not timed(513) and not timed(0)
    assert kernels(5) == ["tile", "tensor"]
    assert kernels(100) == ["tensor", "rowwise"] and kernels(200) == ["rowwise", "tensor"]
    monkeypatch.setattr(quantized, "winner", lambda *_, **__: (True, {"kernel": "rowwise", "block_n": 0, "block_k": 0}))
    assert not timed(40)


def test_fast_sums_are_for_bfloat16() -> None:
    of = OpCall(op="core::quantized_linear", args=call(5, out_dtype=torch.float16))
    assert why_not(of) is None and "exact enough for bfloat16 only" in str(why_not_fast(of))
    assert why_not_fast(OpCall(op="core::quantized_linear", args=call(5))) is None


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_torch(way: str, kernel_device: torch.device) -> None:
    if kernel_device == CPU:
        pytest.skip("torch's own products of fp8 need a GPU")
    for rows in ROWS:
        for changes in ({}, {"bias": randn(96, dtype=torch.bfloat16, seed=7)}, {"x_scale": torch.tensor(0.01)}):
            args = call(rows, **changes)
            there = moved(args, kernel_device)
            scales = (there["x_scale"].reshape(-1), there["w_scale"].reshape(-1))
            config = SkinnyConfig(way, 0, 0)
            found = multiply(there["x_codes"], there["w_codes"], scales, there["bias"], torch.bfloat16, config)
            assert judged(found, args), (rows, changes)


def test_what_a_tuner_tries_is_right(kernel_device: torch.device) -> None:
    for rows in (1, 3, 40):
        args = call(rows, 64, 512)
        there = moved(args, kernel_device)
        scales = (there["x_scale"].reshape(-1), there["w_scale"].reshape(-1))
        for config in list(candidates(rows, 64, 512))[len(WAYS) :: 5 if kernel_device == CPU else 1]:
            found = multiply(there["x_codes"], there["w_codes"], scales, None, torch.bfloat16, config)
            assert judged(found, args), (rows, config)


def test_leading_dimensions_and_no_tokens(kernel_device: torch.device) -> None:
    args = call(6)
    args |= {"x_codes": args["x_codes"].view(2, 3, 256), "x_scale": args["x_scale"].view(2, 3, 1)}
    assert judged(run(args, kernel_device), args)
    empty = call(0)
    assert run(empty, kernel_device).shape == (0, 96)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"x_codes": torch.ones(5, 256, dtype=torch.int8)}, "x_codes are torch.int8"),
        ({"x_scale": torch.ones(5, 2)}, "2 scales for each row"),
        ({"w_scale": torch.ones(3, 1)}, "w_scale has 3 rows"),
        ({"x_scale": torch.ones(1, 1)}, "fewer rows"),
        ({"w_codes": codes(90, 256), "w_scale": torch.ones(90, 1)}, "multiples of 16"),
        ({"out_dtype": torch.float32}, "summed exactly enough for torch.bfloat16, torch.float16 only"),
        ({"x_scale": torch.ones(5, 1, dtype=torch.float64)}, "torch.float64"),
    ],
    ids=str,
)
def test_conditions(changes: dict[str, Any], reason: str | None) -> None:
    found = why_not(OpCall(op="core::quantized_linear", args=call(5, **changes)))
    assert found is None if reason is None else reason in str(found)
