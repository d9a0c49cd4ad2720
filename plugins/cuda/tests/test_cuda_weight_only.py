"""Products with weights of codes: core_cuda/ops/linear/{coded,coded_configs,weight_only}.py, judged against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.common.ops.implementation import OpCall
from core.common.ops.linear.weight_only import WEIGHT_ONLY_LINEAR
from core.common.ops.quantize.symmetric import QUANTIZED_LINEAR
from core.quantization.weights import pack
from tests.kernel_cases import CPU, check, randn

pytest.importorskip("triton", reason="needs triton")

from core_cuda.ops import launching
from core_cuda.ops.linear import weight_only
from core_cuda.ops.linear.coded_configs import CodedConfig, CodedShape, default_config, why_no_tile
from core_cuda.ops.linear.quantized import MAX_INT8_DEPTH, int8_config, multiply_int8, quantized_linear, why_not_library
from core_cuda.ops.linear.quantized import why_not as why_not_quantized
from core_cuda.ops.linear.weight_only import multiply, weight_only_linear, weight_only_linear_other, why_not

HALF = (torch.bfloat16, torch.float16)
CODES = ("int4", "int8", "fp8")


def operands(
    rows: int, code: str, group: int | None, zeros: bool, dtype: torch.dtype = torch.bfloat16,
    columns: int = 80, depth: int = 256,
) -> dict[str, Any]:  # fmt: skip
    """Return a call; group None: one scale a row."""
    draw = torch.Generator().manual_seed(3)
    low, high = (-8, 8) if code == "int4" else (-128, 128)
    codes = torch.randint(low, high, (columns, depth), dtype=torch.int8, generator=draw)
    groups = 1 if group is None else depth // group
    weight = {"int4": lambda: pack(codes, 4), "int8": lambda: codes, "fp8": lambda: codes.to(torch.float8_e4m3fn)}
    zero = torch.randint(low, high, (columns, groups), dtype=torch.int8, generator=draw)
    return {
        "x": randn(rows, depth, dtype=dtype),
        "w_codes": weight[code](),
        "w_scale": randn(columns, groups, seed=1, scale=0.1, shift=1.0) / (high * depth**0.5),
        "w_zero_point": zero if zeros and code != "fp8" else None,
        "bias": randn(columns, dtype=dtype, seed=2),
        "num_bits": 4 if code == "int4" else 8,
    }


def by(config: CodedConfig | None) -> Callable[..., torch.Tensor]:
    """Return what computes calls in this configuration."""

    def kernel(**call: Any) -> torch.Tensor:
        operand = [call[name] for name in ("x", "w_codes", "w_scale", "w_zero_point", "bias", "num_bits")]
        return multiply(*operand, config)

    return kernel


def asked(**args: Any) -> str | None:
    return why_not(OpCall(op="core::weight_only_linear", args=args))


@pytest.mark.parametrize("kernel", [weight_only_linear, weight_only_linear_other], ids=lambda k: k._opname)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_samples_agree_with_the_reference(dtype: torch.dtype, kernel: Any, kernel_device: torch.device) -> None:
    calls = [sample.kwargs for sample in WEIGHT_ONLY_LINEAR.samples(dtype, CPU)]
    assert all(asked(**{"num_bits": 8, **call}) is None for call in calls)
    calls.append(operands(1, "int4", 8, False, dtype, columns=40))  # with the sample of one row enough to be judged
    check(WEIGHT_ONLY_LINEAR, kernel, calls, kernel_device)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group", [None, 64, 128], ids=str)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_kind_of_codes(
    dtype: torch.dtype, code: str, group: int | None, zeros: bool, kernel_device: torch.device
) -> None:
    """K in one program and shared, weights as either operand, and turned into numbers before the product."""
    call = operands(5, code, group, zeros, dtype)
    for config in (CodedConfig(16, 32, 64, split_k=2), CodedConfig(16, 64, 64, swap=True), None):
        check(WEIGHT_ONLY_LINEAR, by(config), [call], kernel_device)


@pytest.mark.parametrize("rows", [1, 19, 75, 150])
def test_numbers_of_rows_and_depths_that_fill_no_tile(rows: int, kernel_device: torch.device) -> None:
    """397 codes: the last word of a row is not full."""
    for code, depth in (("int4", 397), ("int8", 397), ("fp8", 272)):
        call = operands(rows, code, None, code == "int8", columns=83, depth=depth)
        check(WEIGHT_ONLY_LINEAR, weight_only_linear, [call], kernel_device)
        check(WEIGHT_ONLY_LINEAR, by(CodedConfig(64, 64, 128, swap=True, split_k=3)), [call], kernel_device)


def test_rows_of_wider_tensors(kernel_device: torch.device) -> None:
    call = operands(6, "int8", 64, True)
    wide = torch.cat([call["w_codes"], call["w_codes"]], 1)[:, 64:320]
    calls = [
        call | {"x": randn(6, 600, dtype=torch.bfloat16)[:, 64:320], "w_codes": wide},
        call | {"x": randn(256, 6, dtype=torch.bfloat16).T, "w_scale": call["w_scale"].T.contiguous().T},
        call | {"w_codes": call["w_codes"].T.contiguous().T, "w_zero_point": call["w_zero_point"].T.contiguous().T},
        call | {"x": randn(2, 3, 256, dtype=torch.bfloat16).transpose(0, 1)},
    ]
    for kernel in (weight_only_linear, weight_only_linear_other):
        check(WEIGHT_ONLY_LINEAR, kernel, calls, kernel_device)


@pytest.mark.parametrize("config", [CodedConfig(16, 32, 64, split_k=4), None], ids=["tile", "before"])
def test_nan_stays_in_its_row(config: CodedConfig | None, kernel_device: torch.device) -> None:
    call = operands(5, "int4", None, False)
    call["x"][1, 3], call["x"][3, 255] = float("nan"), float("inf")
    found = by(config)(**{n: v.to(kernel_device) if isinstance(v, torch.Tensor) else v for n, v in call.items()}).cpu()
    assert found[1].isnan().all() and not found[3].isfinite().any() and found[[0, 2, 4]].isfinite().all()


def test_the_same_bits_each_time(kernel_device: torch.device) -> None:
    call = operands(5, "int4", 64, True, columns=48)
    there = {n: v.to(kernel_device) if isinstance(v, torch.Tensor) else v for n, v in call.items()}
    found = [by(CodedConfig(16, 16, 64, split_k=4))(**there) for _ in range(3 if kernel_device == CPU else 50)]
    assert all(torch.equal(found[0], other) for other in found)


def test_what_a_tuner_tries_is_right(kernel_device: torch.device) -> None:
    for rows, code in ((3, "int4"), (40, "int8")):
        call = operands(rows, code, 64, True, columns=48, depth=256)
        shape = CodedShape(rows, 48, 256, call["num_bits"], 64)
        for config in list(weight_only.candidates(shape))[:: 4 if kernel_device == CPU else 1]:
            check(WEIGHT_ONLY_LINEAR, by(config), [call], kernel_device)


def test_calls_that_the_kernels_do_not_take() -> None:
    call = operands(6, "int4", 64, False)
    assert asked(**call) is None
    assert "x is torch.float32, and the kernels take" in str(asked(**{**call, "x": call["x"].float()}))
    assert "w_scale is torch.float16" in str(asked(**{**call, "w_scale": call["w_scale"].half()}))
    assert "bias is torch.float32 and x torch.bfloat16" in str(asked(**{**call, "bias": call["bias"].float()}))


def test_what_the_sizes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows, and groups that no tile fits, are multiplied by cuBLAS; the other way is timed between the ends."""

    def chosen(rows: int, code: str = "int4", group: int | None = 128) -> list[bool]:
        call = operands(1, code, group, False, columns=64, depth=384)
        shape = weight_only.shape_of(call["x"].expand(rows, -1), call["w_codes"], call["w_scale"], call["num_bits"])
        both = (weight_only._choose, weight_only._choose_other)
        return [choose(shape, call["w_codes"].dtype) is not None for choose in both]

    def timed(rows: int, **changes: Any) -> str | None:
        call = operands(1, "int4", 128, False, depth=384) | changes
        call |= {"x": call["x"].expand(rows, -1)}
        return weight_only.other_timed(OpCall(op="core::weight_only_linear", args=call))

    assert chosen(1) == [True, False] and chosen(128) == [True, False] and chosen(129) == [False, True]
    assert chosen(256, "int8") == [True, False] and chosen(257, "fp8") == [False, True]
    assert chosen(8, group=24) == [False, False]
    assert timed(33) is None and timed(2048) is None
    assert "32 rows" in str(timed(32)) and "2049 rows" in str(timed(2049))
    assert "groups of 24 codes" in str(timed(64, w_scale=torch.ones(80, 16)))
    monkeypatch.setattr(weight_only, "winner", lambda *_, **__: (True, None))
    assert chosen(1) == [False, False] and "measured" in str(timed(33))


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 128, 512, 4096])
def test_defaults_fill_the_multiprocessors(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 132)
    for bits, coded_x, group in ((4, False, 128), (4, False, 32), (8, False, 4096), (8, True, 4096)):
        shape = CodedShape(rows, 4096, 4096, bits, group, coded_x=coded_x)
        config = default_config(shape)
        tiles = -(-rows // config.block_m) * -(-4096 // config.block_n)
        assert tiles * config.split_k >= 120 and config.block_k <= group and config.num_stages >= 2
        assert why_no_tile(shape) is None
    assert "groups of 24" in str(why_no_tile(CodedShape(rows, 4096, 4128, 4, 24)))


def int8_call(rows: int, columns: int = 80, depth: int = 272, **changes: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(5)
    x, weight = (torch.randint(-128, 128, (n, depth), dtype=torch.int8, generator=draw) for n in (rows, columns))
    scales = [torch.rand(n, 1, generator=draw) * 0.01 + 0.005 for n in (rows, columns)]
    call = {"x_codes": x, "x_scale": scales[0], "w_codes": weight, "w_scale": scales[1], "bias": None}
    return call | {"out_dtype": torch.bfloat16} | changes


@pytest.mark.parametrize("out_dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 19, 75])
def test_int8_by_int8(rows: int, out_dtype: torch.dtype, kernel_device: torch.device) -> None:
    bias = randn(80, dtype=out_dtype, seed=7)
    for changes in ({}, {"bias": bias}, {"x_scale": torch.tensor(0.01)}, {"w_scale": torch.tensor([[0.02]])}):
        call = int8_call(rows, out_dtype=out_dtype, **changes)
        assert why_not_quantized(OpCall(op="core::quantized_linear", args=call)) is None
        check(QUANTIZED_LINEAR, quantized_linear, [call], kernel_device)


def test_int8_sums_are_exact(kernel_device: torch.device) -> None:
    """Sums that fp32 cannot hold, whose scale leaves them small."""
    call = int8_call(5, 48, 2048, out_dtype=torch.float32)
    call |= {"x_codes": torch.full((5, 2048), -127, dtype=torch.int8), "x_scale": torch.tensor(1.0)}
    call |= {"w_codes": torch.full((48, 2048), -127, dtype=torch.int8), "w_scale": torch.ones(48, 1)}
    call["w_codes"][1, 7] = -128
    there = [call[name].to(kernel_device) for name in ("x_codes", "w_codes")]
    scales = (torch.ones(1, device=kernel_device), torch.ones(48, device=kernel_device))
    for config in (int8_config(5, 48, 2048), CodedConfig(16, 128, 128, swap=True, split_k=3)):
        found = multiply_int8(*there, scales, None, torch.float32, config).cpu()
        wanted = call["x_codes"].long() @ call["w_codes"].long().T
        assert torch.equal(found, wanted.float())


def test_int8_conditions() -> None:
    def reason(**changes: Any) -> str | None:
        return why_not_quantized(OpCall(op="core::quantized_linear", args=int8_call(5, **changes)))

    assert reason() is None
    assert "fewer rows" in str(reason(x_scale=torch.ones(1, 1)))
    assert "x_zero_point" in str(reason(x_zero_point=torch.zeros(5, 1, dtype=torch.int8)))
    assert "codes of one dtype" in str(reason(x_codes=torch.zeros(5, 272).to(torch.float8_e4m3fn)))
    assert f"int32 sums at most {MAX_INT8_DEPTH}" in str(reason(columns=2, depth=MAX_INT8_DEPTH + 1))
    assert reason(columns=2, depth=MAX_INT8_DEPTH) is None
    assert "of the library take" in str(why_not_library(OpCall(op="core::quantized_linear", args=int8_call(5))))
