"""What is left beside codes that go into a cache, as numbers, is what the codes there stand for, however rows are
shared out; and codes are those of torch, for every value of half precision."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.common.ops.attention.cache import stored
from tests.kernel_cases import randn

pytest.importorskip("triton", reason="needs triton")
import triton
import triton.language as tl

from core_cuda.ops import launching
from core_cuda.ops.cache_write import write_cache
from core_cuda.ops.quantize import to_codes, to_numbers
from core_cuda.ops.rotary.rotation import RotaryConfig, rotate_and_write

CODE = torch.float8_e4m3fn
TOKENS, HEADS = 19, 2


def places(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return caches of codes for keys and values, slots, and where sequences start: the last two tokens are padding."""
    caches = [torch.zeros(4, 8, HEADS, size, dtype=CODE, device=device) for _ in range(2)]
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(0))[:TOKENS].to(device)
    return caches[0], caches[1], slots, torch.tensor([0, 5, TOKENS - 2], dtype=torch.int32, device=device)


def scales(device: torch.device) -> dict[str, Tensor]:
    return {"k_scale": torch.tensor(0.0137, device=device), "v_scale": torch.tensor([0.011, 0.019], device=device)}


def check_numbers(numbers: Tensor, cache: Tensor, slots: Tensor) -> None:
    real = TOKENS - 2
    wanted = cache.flatten(0, 1).view(torch.uint8)[slots[:real]].view(CODE).to(numbers.dtype)
    assert wanted.float().abs().max() > 100  # the codes' range is used
    assert torch.equal(numbers[:real], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_beside_a_rotation_are_those_of_the_codes(dtype: torch.dtype, kernel_device: torch.device) -> None:
    shares = [(1, 1), (2, 1), (4, 2), (8, 4)] if launching.INTERPRETED else [(1, 1), (2, 8), (8, 2), (32, 4)]
    for size in (64,) if launching.INTERPRETED else (16, 80, 128):  # each is compiled for each share
        query, key, value = (randn(TOKENS, n, size, dtype=dtype).to(kernel_device) for n in (4, HEADS, HEADS))
        angles = randn(TOKENS, size, dtype=dtype).to(kernel_device)
        for rows, num_warps in shares:
            key_cache, value_cache, slots, starts = places(size, kernel_device)
            _, turned, rounded = rotate_and_write(
                *(query, key, value, angles.cos(), angles.sin(), key_cache, value_cache, slots, starts),
                **scales(kernel_device),
                config=RotaryConfig(rows=rows, num_warps=num_warps),
            )
            check_numbers(turned, key_cache, slots)
            check_numbers(rounded, value_cache, slots)


@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_beside_a_write_are_those_of_the_codes(
    dtype: torch.dtype, size: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for spread in (1, 8, 64):  # how many tokens a program takes
        monkeypatch.setattr(launching, "num_multiprocessors", lambda n=spread: max(TOKENS * HEADS // n, 1))
        key, value = (randn(TOKENS, HEADS, size, dtype=dtype).to(kernel_device) for _ in range(2))
        key_cache, value_cache, slots, starts = places(size, kernel_device)
        numbers = write_cache(key, value, key_cache, value_cache, slots, starts, **scales(kernel_device))
        for given, cache, scale, each in zip(
            (key, value), (key_cache, value_cache), scales(kernel_device).values(), numbers, strict=True
        ):
            check_numbers(each, cache, slots)
            wanted = stored(given.cpu(), CODE, scale.cpu())[: TOKENS - 2].view(torch.uint8)
            assert torch.equal(cache.flatten(0, 1).view(torch.uint8)[slots[: TOKENS - 2]].cpu(), wanted)


@triton.jit
def _each_kernel(values, codes, numbers, scale, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(values + at).to(tl.float32)
    tl.store(codes + at, to_codes(wide, scale, codes.dtype.element_ty))
    tl.store(numbers + at, to_numbers(wide, scale))


@pytest.mark.parametrize("scale", [1.0, 0.0137, 3.0, 2.0**-20, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_becomes_the_code_of_its_quotient(
    dtype: torch.dtype, scale: float, kernel_device: torch.device
) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).to(kernel_device)
    codes = torch.empty(values.shape, dtype=CODE, device=kernel_device)
    numbers = torch.empty(values.shape, dtype=torch.float32, device=kernel_device)
    _each_kernel[(256,)](values, codes, numbers, scale, BLOCK=256, num_warps=1)
    quotient = values.cpu().float() / torch.tensor(scale)
    wanted = quotient.clamp(-448, 448).to(CODE)
    found = codes.cpu().float()
    same = (found == wanted.float()) | (quotient.isnan() & found.isnan())  # of zero the sign may differ
    assert same.all(), quotient[~same]
    assert torch.equal(numbers.cpu().nan_to_num(nan=-1e9), found.nan_to_num(nan=-1e9))
