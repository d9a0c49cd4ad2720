"""Time sums over GPUs of one host in CUDA graphs: NCCL's and `core_cuda`'s, alone, with add and RMSNorm, and fused.

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
from core_cuda.collective_norm import all_reduce_add_rms_norm
from core_cuda.ops.norm.norms import add_rms_norm
from core_cuda.symmetric import join

CHAIN, REPLAYS, WARM = 32, 40, 5
TOKENS = (1, 16, 32, 64, 128, 256, 512)
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _timed(step: Step, tokens: int, hidden: int) -> tuple[float, float, float]:
    """Return the median, and the 10th and 90th percentile, of microseconds."""
    x, residual = (torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(2))

    def chain() -> Tensor:
        total, rest = x, residual
        for _ in range(CHAIN):
            total, rest = step(total, rest)
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


def _steps(hidden: int) -> dict[str, Step]:
    """Return, by name, what a chain repeats: from x and a residual to what the next step takes."""
    weight = (1 + 0.1 * torch.randn(hidden, device="cuda")).bfloat16()

    def normed(total: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = add_rms_norm(x=total, residual=rest, weight=weight, eps=1e-5)
        return found

    def fused(total: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = all_reduce_add_rms_norm(total, rest, weight, 1e-5, group="")
        return found

    sums: dict[str, Callable[[Tensor, str], Tensor]] = {
        "NCCL": ALL_REDUCE.reference,
        "core_cuda::all_reduce": collective.all_reduce,
    }
    steps: dict[str, Step] = {}
    for name, reduce in sums.items():
        steps[name] = lambda total, rest, reduce=reduce: (reduce(total, ""), rest)  # type: ignore[misc]
        steps[f"{name} + add_rms_norm"] = lambda total, rest, reduce=reduce: normed(reduce(total, ""), rest)  # type: ignore[misc]
    return steps | {"core_cuda::all_reduce_add_rms_norm": fused}


def main() -> None:
    """Time all on each rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    core.select_device("cuda", int(os.environ["LOCAL_RANK"]))
    place = initialize("nccl")
    collective.MOST_BYTES = dict.fromkeys(collective.MOST_BYTES, max(TOKENS) * asked.hidden * 2)
    if reason := join(""):
        raise SystemExit(f"these GPUs share no memory: {reason}")
    found = {}
    for name, step in _steps(asked.hidden).items():
        width = asked.hidden if "rms_norm" in name.partition("+")[0] else 0
        for tokens in TOKENS:
            x = torch.empty(tokens, asked.hidden, device="cuda", dtype=torch.bfloat16)
            if "NCCL" not in name and collective.by_kernel(x, "", width) is None:
                if place.rank == 0:
                    print(f"{name}, {tokens} tokens: more than the memory that {place.size} GPUs share", flush=True)
                continue
            figures = _timed(step, tokens, asked.hidden)
            row = f"{name}, {tokens} tokens"
            found[row] = dict(zip(("median_us", "p10_us", "p90_us"), figures, strict=True))
            if place.rank == 0:
                print(f"{row:60} {figures[0]:7.2f} us ({figures[1]:.2f} to {figures[2]:.2f})", flush=True)
    if place.rank == 0 and asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
