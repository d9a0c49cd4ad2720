"""core_cuda/ops/moe/grouped_sort.py: pairs of token and expert in their order, and the tiles that cut them up."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops import launching
from core_cuda.ops.moe.grouped_sort import count_kernel, place_kernel, sort_kernel


@pytest.mark.parametrize("launches", [1, 2])
def test_sorting(launches: int, kernel_device: torch.device) -> None:
    """Pairs of an expert stand together, in their order, and tiles cut them up; also over many blocks of pairs."""
    experts, pairs, block_m = 37, 700, 16
    chosen = torch.randint(-2, experts + 2, (pairs,), generator=torch.Generator().manual_seed(0))
    chosen[chosen == 5] = 6  # an expert without pairs
    num_tiles = (pairs + experts * (block_m - 1)) // block_m
    order = torch.full((pairs,), -7, dtype=torch.int32, device=kernel_device)
    tiles = torch.full((num_tiles, 3), -7, dtype=torch.int32, device=kernel_device)
    indices, sizes = chosen.to(kernel_device), (order, tiles, pairs, experts, num_tiles)
    options = {"EXPERTS": 64, "BLOCK": 128, "num_warps": 4}
    if launches == 1:
        launching.launch(sort_kernel, (experts,), indices, *sizes, BLOCK_M=block_m, **options)
    else:
        counts = torch.full((6, 64), -7, dtype=torch.int32, device=kernel_device)
        launching.launch(count_kernel, (6,), indices, counts, pairs, experts, **options)
        launching.launch(place_kernel, (6,), indices, counts, *sizes, BLOCK_M=block_m, ROWS=4, **options)
    wanted, expected, begin = [], [], 0
    for expert in range(experts):
        own = (chosen == expert).nonzero().flatten().tolist()
        end = begin + len(own)
        wanted += own
        expected += [[expert, at, min(at + block_m, end)] for at in range(begin, end, block_m)]
        begin = end
    assert order.tolist() == wanted + [-7] * (pairs - len(wanted))
    assert tiles[: len(expected)].tolist() == expected
    assert (tiles[len(expected) :, 0] == -1).all() and len(expected) < num_tiles
