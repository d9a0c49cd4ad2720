"""One of two processes, each with a GPU, that sum by `core_cuda::all_reduce`, outside of graphs and in one."""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import Tensor, distributed

import core
from core.common.ops.collective import ALL_REDUCE
from core.engine.models.distributed import initialize
from core_cuda.collective import MOST_BYTES, all_reduce
from core_cuda.symmetric import join

SHAPES = ((1, 8192), (7, 48), (3, 5, 96), (64, 4096), (513, 4096), (1025, 4096))
"""The last one is too large for the kernel, and goes by NCCL."""


def part(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    """Return what a rank adds, in integers: their sums are exact, in whatever order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).to(torch.device("cuda", torch.cuda.current_device()), dtype)


def main() -> None:
    """Compare with sums of both ranks' parts, and print JSON on rank 0."""
    core.select_device("cuda", int(os.environ["LOCAL_RANK"]))
    place = initialize("nccl", timeout_s=120)
    joined, equal = join(""), {}
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            ours = part(shape, dtype, place.rank)
            total = sum(part(shape, dtype, rank) for rank in range(place.size))
            equal[f"{shape} {dtype}"] = torch.equal(all_reduce(ours, ""), total)
            turned = all_reduce(ours.transpose(0, 1), "")
            equal[f"{shape} {dtype} transposed"] = torch.equal(turned, total.transpose(0, 1))
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    everybodys = [torch.empty_like(x) for _ in range(place.size)]
    distributed.all_gather(everybodys, all_reduce(x, ""))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        all_reduce(x, "")
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    results = {
        "joined": joined,
        "equal": equal,
        "by_kernel": "sum_kernel" in names and x.numel() * 2 <= MOST_BYTES[place.size],
        "ranks_agree": all(torch.equal(everybodys[0], each) for each in everybodys),
        "replayed": replayed(x),
    }
    if place.rank == 0:
        sys.stdout.write(json.dumps(results) + "\n")


def replayed(x: Tensor) -> bool:
    """Tell whether a graph of many sums, one behind the other, gives what NCCL gives, at each of 200 replays."""

    def chain(reduce: object) -> Tensor:
        total = x
        for _ in range(32):
            total = reduce(total, "") / 2  # type: ignore[operator]
        return total

    wanted, graph = chain(ALL_REDUCE.reference), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain(all_reduce)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = chain(all_reduce)
    for _ in range(200):
        found.zero_()
        graph.replay()
        if not torch.equal(found, wanted):
            return False
    return True


if __name__ == "__main__":
    main()
