"""Time sums over GPUs of one host in CUDA graphs: NCCL's and `core_cuda::all_reduce`, alone and with add and RMSNorm.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/all_reduce.py [--hidden 8192] [--json FILE]

A graph holds a chain of 32 sums in bf16; microseconds of one, the median of 40 replays (10th and 90th percentile). The
kernel is used for every size here, so that its limit (`MOST_BYTES`) can be read off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed

import core
from core.common.ops.collective import ALL_REDUCE
from core.engine.models.distributed import initialize
from core_cuda import collective
from core_cuda.ops.norm.norms import add_rms_norm

CHAIN, REPLAYS, WARM = 32, 40, 5
TOKENS = (1, 16, 32, 64, 128, 256, 512)
Sum = Callable[[Tensor, str], Tensor]


def _timed(reduce: Sum, tokens: int, weight: Tensor, *, with_norm: bool) -> tuple[float, float, float]:
    """Return the median, and the 10th and 90th percentile, of microseconds."""
    x, residual = (torch.randn(tokens, weight.numel(), device="cuda").bfloat16() for _ in range(2))

    def chain() -> Tensor:
        total, rest = x, residual
        for _ in range(CHAIN):
            total = reduce(total, "")
            if with_norm:
                total, rest = add_rms_norm(x=total, residual=rest, weight=weight, eps=1e-5)
        return total

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        chain()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS + WARM):
        x.normal_()
        distributed.barrier()
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CHAIN)
    graph.reset()
    tenths = statistics.quantiles(times[WARM:], n=10)
    return statistics.median(times[WARM:]), tenths[0], tenths[-1]


def main() -> None:
    """Time all on each rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    core.select_device("cuda", int(os.environ["LOCAL_RANK"]))
    place = initialize("nccl")
    collective.MOST_BYTES = dict.fromkeys(collective.MOST_BYTES, max(TOKENS) * asked.hidden * 2)
    if reason := collective.join(""):
        raise SystemExit(f"these GPUs share no memory: {reason}")
    weight = (1 + 0.1 * torch.randn(asked.hidden, device="cuda")).bfloat16()
    ways = {"NCCL": ALL_REDUCE.reference, "core_cuda::all_reduce": collective.all_reduce}
    found = {}
    for name, reduce in ways.items():
        for with_norm in (False, True):
            for tokens in TOKENS:
                figures = _timed(reduce, tokens, weight, with_norm=with_norm)
                row = f"{name}{' + add_rms_norm' if with_norm else ''}, {tokens} tokens"
                found[row] = dict(zip(("median_us", "p10_us", "p90_us"), figures, strict=True))
                if place.rank == 0:
                    print(f"{row:45} {figures[0]:7.2f} us ({figures[1]:.2f} to {figures[2]:.2f})", flush=True)
    if place.rank == 0 and asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
