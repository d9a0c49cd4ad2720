"""core_cuda/ops/linear/hopper_coded*.py, hopper_codes.py: few rows times weights of codes at compute capability 9.

Gluon has no interpreter: test_cuda_compiles.py compiles the kernel, and its numbers are judged on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.linear.weight_only import WEIGHT_ONLY_LINEAR
from core.quantization.weights import pack
from tests.kernel_cases import check, moved, randn

pytest.importorskip("triton", reason="needs triton")

from core_cuda.ops import launching
from core_cuda.ops.linear import hopper_coded, skinny_configs, weight_only
from core_cuda.ops.linear.coded_configs import CodedShape
from core_cuda.ops.linear.hopper_coded import HopperCodedConfig, hopper_coded_linear

KINDS = {"int4": (4, 128), "int4, groups of 64": (4, 64), "int4, a scale a row": (4, None), "int8": (8, None)}
KINDS |= {"int8, groups of 128": (8, 128), "fp8": (8, None)}
MULTIPROCESSORS = 132


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available() or not skinny_configs.is_hopper():
        pytest.skip("needs an NVIDIA GPU of compute capability 9")
    return torch.device("cuda")


def operands(rows: int, kind: str, *, zeros: bool, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> dict[str, Any]:
    (bits, group), draw = KINDS[kind], torch.Generator().manual_seed(3)
    columns, depth = sizes.get("columns", 200), sizes.get("depth", 1536)
    low, high = (-8, 8) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (columns, depth), dtype=torch.int8, generator=draw)
    groups = 1 if group is None else depth // group
    zero = torch.randint(low, high, (columns, groups), dtype=torch.int8, generator=draw)
    return {
        "x": randn(rows, depth, dtype=dtype),
        "w_codes": pack(codes, 4) if bits == 4 else codes.to(torch.float8_e4m3fn) if kind == "fp8" else codes,
        "w_scale": randn(columns, groups, seed=1, scale=0.1, shift=1.0) / (high * depth**0.5),
        "w_zero_point": zero if zeros and kind != "fp8" else None,
        "bias": randn(columns, dtype=dtype, seed=2),
        "num_bits": bits,
    }


def by(config: HopperCodedConfig | None) -> Any:
    def kernel(**call: Any) -> Tensor:
        operand = [call[name] for name in ("x", "w_codes", "w_scale", "w_zero_point", "bias")]
        return hopper_coded_linear(*operand, bits=call["num_bits"], config=config)

    return kernel


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind: str, zeros: bool, gpu: torch.device) -> None:
    for rows, dtype, split_k in ((1, torch.bfloat16, 1), (11, torch.float16, 3)):
        call = operands(rows, kind, zeros=zeros, dtype=dtype)
        check(WEIGHT_ONLY_LINEAR, by(HopperCodedConfig(256, split_k)), [call], gpu)


@pytest.mark.gpu
def test_the_op_takes_it_and_gives_the_same_bits_each_time(gpu: torch.device) -> None:
    call = operands(6, "int4", zeros=False, columns=2048, depth=4096)
    check(WEIGHT_ONLY_LINEAR, weight_only.weight_only_linear_early, [call], gpu)
    there = moved(call, gpu)
    found = [weight_only.weight_only_linear_early(**there) for _ in range(50)]
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.gpu
@pytest.mark.parametrize("block_k", [256, 512])
def test_other_tiles_and_shares(block_k: int, gpu: torch.device) -> None:
    call = operands(4, "int4", zeros=False)
    for split_k in (1, 2, 8):
        check(WEIGHT_ONLY_LINEAR, by(HopperCodedConfig(block_k, split_k)), [call], gpu)


def bound(call: dict[str, Any], *names: str) -> str | None:
    return weight_only.why_not_early(WEIGHT_ONLY_LINEAR.bind((), call, constants=frozenset(names)))


def test_weights_are_read_early_only_if_all_of_them_are_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only, "is_hopper", lambda: True)
    call = operands(2, "int4", zeros=True)
    assert bound(call, "w_codes", "w_scale", "w_zero_point") is None
    assert "w_zero_point are no constants" in str(bound(call, "w_codes", "w_scale"))
    assert bound(call | {"w_zero_point": None}, "w_codes", "w_scale") is None
    monkeypatch.setattr(weight_only, "is_hopper", lambda: False)
    assert "compute capability 9 only" in str(bound(call, "w_codes", "w_scale", "w_zero_point"))


def test_groups_and_rows_that_do_not_fit_are_refused() -> None:
    assert hopper_coded.why_not(CodedShape(1, 64, 512, 4, 128)) is None
    assert "groups of 32" in str(hopper_coded.why_not(CodedShape(1, 64, 512, 4, 32)))
    assert "rows of 500 codes" in str(hopper_coded.why_not(CodedShape(1, 64, 500, 4, 500)))


def test_defaults_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: MULTIPROCESSORS)
    for rows in (1, 8, 16):
        for columns, depth in ((4096, 4096), (14336, 4096), (4096, 14336), (96, 256)):
            config = hopper_coded.default_config(CodedShape(rows, columns, depth, 4, 128))
            assert -(-columns // 64) * config.split_k <= max(2 * MULTIPROCESSORS, -(-columns // 64)), config
    assert hopper_coded.default_config(CodedShape(1, 4096, 14336, 4, 128)).split_k == 4
