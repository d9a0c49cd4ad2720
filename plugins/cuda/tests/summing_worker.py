"""One of several processes that sum by `core_cuda.ops.summing` in Triton's interpreter, through files that all map."""

from __future__ import annotations

import importlib
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core_cuda.ops.norm.norms import options_of
from core_cuda.ops.summing import launch_sum, shares_of
from core_cuda.symmetric import AREA_BYTES, HALVES, Shared

SHAPES = ((1, 64), (7, 48), (2, 1000), (5, 333), (2, 2, 3, 128))
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def shared_file(folder: Path, rank: int, size: int, num_programs: int) -> Shared:
    """Return the memory of a rank; the test has made it, a file for each rank, empty."""
    num_bytes = HALVES * size * num_programs * AREA_BYTES[size]
    memories = [
        torch.from_file(str(folder / str(of)), shared=True, size=num_bytes, dtype=torch.uint8) for of in range(size)
    ]
    return Shared(
        rank=rank,
        size=size,
        num_programs=num_programs,
        area_bytes=AREA_BYTES[size],
        mine=memories[rank],
        places=tuple(memory.data_ptr() for memory in memories),
        handle=memories,
        turns=torch.zeros(num_programs, dtype=torch.int32),
    )


def total_of(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def check(shared: Shared, parts: list[Tensor], kind: str, generator: torch.Generator) -> None:
    """Sum in one of three ways, and compare with what the references give."""
    own = parts[shared.rank]
    total, out, summed = total_of(parts), torch.empty_like(own), torch.empty_like(own)
    width = own.shape[-1]
    shares = shares_of(shared, own.numel(), own.element_size(), 0 if kind == "plain" else width)
    assert shares is not None
    if kind == "plain":
        launch_sum(shared, shares, own, out)
        assert torch.equal(out, total)
        return
    residual = torch.randn(own.shape, generator=generator).to(own.dtype)
    weight = torch.randn(width, generator=generator).to(own.dtype)
    norm = options_of(weight, 1e-5, 0.0, own.dtype, (own.dtype, None, None))
    if kind == "norm":
        launch_sum(shared, shares, own, out, norm=norm)
        wanted = RMS_NORM.reference(total, weight, 1e-5, normed_dtype=own.dtype)
    else:
        launch_sum(shared, shares, own, out, residual=residual, total=summed, norm=norm)
        wanted, total = ADD_RMS_NORM.reference(total, residual, weight, 1e-5, normed_dtype=own.dtype)
        assert torch.equal(summed, total)
    torch.testing.assert_close(out, wanted)


def main() -> None:
    """Do the same calls as all others, late in some."""
    rank, size, num_programs, num_calls = map(int, sys.argv[1:5])
    importlib.import_module("conftest")._mend(pytest.MonkeyPatch())  # that of this folder
    shared, chance = shared_file(Path(sys.argv[5]), rank, size, num_programs), random.Random(0)
    for turn in range(num_calls):
        generator = torch.Generator().manual_seed(turn)
        shape, dtype, kind = chance.choice(SHAPES), chance.choice(DTYPES), ("plain", "norm", "add")[turn % 3]
        parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]
        if chance.randrange(size) == rank:
            time.sleep(0.05)
        check(shared, parts, kind, generator)
    if rank == 0:
        ones = torch.full((1, 64), -1, dtype=torch.int16).view(torch.bfloat16)  # the NaN that says "not sent yet"
    else:
        ones = torch.zeros(1, 64, dtype=torch.bfloat16)
    out, shares = torch.empty_like(ones), shares_of(shared, 64, 2)
    assert shares is not None
    launch_sum(shared, shares, ones, out)
    assert out.isnan().all()
    assert bool((shared.mine == 255).all())  # all that was sent was read and emptied
    sys.stdout.write(f"{num_calls} calls\n")


if __name__ == "__main__":
    main()
