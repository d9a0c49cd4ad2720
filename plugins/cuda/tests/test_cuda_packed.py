"""core_cuda/ops/packed.py: every code, in its place."""

from __future__ import annotations

import pytest
import torch

from core.common.ops.linear.weight_only import CODES_PER_WORD
from core.common.ops.linear.weight_only import unpack as reference

pytest.importorskip("triton", reason="needs triton")
import triton
import triton.language as tl

from core_cuda.ops import launching
from core_cuda.ops.packed import unpack, unpack_bytes, widen


@triton.jit
def _unpack_kernel(words, zeros, out, ROWS: tl.constexpr, WIDTH: tl.constexpr, HAS_ZEROS: tl.constexpr):  # noqa: ANN001, ANN202
    rows, at = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    zero = tl.load(zeros + rows).to(tl.float32) if HAS_ZEROS else 0.0
    codes = unpack(tl.load(words + rows * WIDTH + at), zero)
    tl.store(out + rows * (8 * WIDTH) + tl.arange(0, 8 * WIDTH)[None, :], codes.to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_codes_come_in_order_and_exact(dtype: torch.dtype, has_zeros: bool, kernel_device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (16, 4), dtype=torch.int32, generator=draw)
    zeros = torch.randint(-128, 128, (16, 1), dtype=torch.int8, generator=draw)
    wanted = reference(words, 4, 4 * CODES_PER_WORD).to(torch.float32) - (zeros if has_zeros else 0)
    assert wanted.unique().numel() >= 16
    out = torch.empty(16, 32, dtype=dtype, device=kernel_device)
    arguments = (words.to(kernel_device), zeros.to(kernel_device), out)
    launching.launch(_unpack_kernel, (1,), *arguments, ROWS=16, WIDTH=4, HAS_ZEROS=has_zeros)
    assert torch.equal(out.cpu(), wanted.to(dtype)) and torch.equal(wanted.to(dtype).to(torch.float32), wanted)


@triton.jit
def _widen_kernel(codes, zeros, out, SIZE: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.arange(0, SIZE)
    numbers = widen(tl.load(codes + at), tl.load(zeros + at).to(tl.float32))
    tl.store(out + at, numbers.to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_of_8_bits_are_exact(dtype: torch.dtype, kernel_device: torch.device) -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8)
    for zeros in (codes, codes.flip(0), torch.zeros_like(codes)):
        wanted = codes.to(torch.float32) - zeros
        out = torch.empty(256, dtype=dtype, device=kernel_device)
        launching.launch(_widen_kernel, (1,), codes.to(kernel_device), zeros.to(kernel_device), out, SIZE=256)
        assert torch.equal(out.cpu().to(torch.float32), wanted)


@triton.jit
def _unpack_bytes_kernel(codes, out, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # noqa: ANN001, ANN202
    rows = tl.arange(0, ROWS)[:, None]
    numbers = unpack_bytes(tl.load(codes + rows * WIDTH + tl.arange(0, WIDTH)[None, :]), out.dtype.element_ty)
    tl.store(out + rows * (2 * WIDTH) + tl.arange(0, 2 * WIDTH)[None, :], numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bytes_of_words_hold_codes_in_order(dtype: torch.dtype, kernel_device: torch.device) -> None:
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (16, 4), dtype=torch.int32, generator=draw)
    out = torch.empty(16, 32, dtype=dtype, device=kernel_device)
    launching.launch(_unpack_bytes_kernel, (1,), words.to(kernel_device).view(torch.uint8), out, ROWS=16, WIDTH=16)
    assert torch.equal(out.cpu(), reference(words, 4, 4 * CODES_PER_WORD).to(dtype))
