"""Time products with the collective next to them over GPUs of one host: NCCL then cuBLAS, torch's fused ops, and ours.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/async_tensor_parallel.py [--tokens 1024,8192]
        [--hidden 8192] [--intermediate 28672] [--json FILE]

The products are those of a decoder layer of Llama, cut by the number of GPUs. A graph holds 4 calls in bf16;
milliseconds of one, the median of 20 replays (10th and 90th percentile). "product alone" has no collective: no way can
be faster. What a layer gains is told at the end: its sums by NCCL's all-reduce, against each way of splitting them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn import functional

import core
from core.common.ops.collective import ALL_GATHER, ALL_GATHER_LINEAR, ALL_REDUCE, LINEAR_REDUCE_SCATTER, REDUCE_SCATTER
from core.engine.models.distributed import initialize
from core_cuda import exchange
from core_cuda.collective_linear import all_gather_linear, linear_reduce_scatter
from core_cuda.symmetric import apart

CHAIN, REPLAYS, WARM = 4, 20, 3
NCCL, OURS, TORCH, ALONE = "NCCL, cuBLAS", "core_cuda", "torch's fused op", "product alone"
Way = Callable[[Tensor, Tensor], object]


class Layer(NamedTuple):
    """A product of a decoder layer: (T, inner) by (outer, inner), of which x or the result is cut by tokens."""

    name: str
    inner: int
    outer: int
    gathers: bool


def layers(hidden: int, intermediate: int, size: int) -> tuple[Layer, ...]:
    """Return the products of one GPU of `size`; keys and values are an eighth of the heads each."""
    return (
        Layer("qkv", hidden, (hidden + hidden // 4) // size, True),
        Layer("o", hidden // size, hidden, False),
        Layer("gate and up", hidden, 2 * intermediate // size, True),
        Layer("down", intermediate // size, hidden, False),
    )


def ways(gathers: bool, group: str) -> dict[str, Way]:
    """Return the ways of a product with the collective before it, or after it."""
    fused = torch.ops.symm_mem
    if gathers:
        return {
            NCCL: lambda x, weight: ALL_GATHER_LINEAR.reference(x, weight, None, ""),
            OURS: lambda x, weight: all_gather_linear(x, weight, None, ""),
            TORCH: lambda x, weight: fused.fused_all_gather_matmul(x, [weight.t()], 0, group),
        }
    return {
        NCCL: lambda x, weight: LINEAR_REDUCE_SCATTER.reference(x, weight, None, ""),
        OURS: lambda x, weight: linear_reduce_scatter(x, weight, None, ""),
        TORCH: lambda x, weight: fused.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group),
    }


def timed(call: Callable[[], object], side: torch.cuda.Stream) -> dict[str, float]:
    """Return the median, and the 10th and 90th percentile, of the milliseconds of one call in a graph.

    side: what all calls are captured on.
    """
    graph, times = torch.cuda.CUDAGraph(), []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(CHAIN):
            call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS + WARM):
        distributed.barrier()
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CHAIN)
    graph.reset()
    exchange.release(side.cuda_stream)
    tenths = statistics.quantiles(times[WARM:], n=10)
    return {"median_ms": statistics.median(times[WARM:]), "p10_ms": tenths[0], "p90_ms": tenths[-1]}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Table:
    """Times by row, told by rank 0 as they come."""

    def __init__(self, rank: int) -> None:
        self.rows: dict[str, dict[str, float]] = {}
        self._rank, self._side = rank, torch.cuda.Stream()

    def add(self, name: str, call: Callable[[], object]) -> None:
        """Time a row."""
        self.rows[name] = found = timed(call, self._side)
        self.tell(f"{name:48} {found['median_ms']:8.3f} ms ({found['p10_ms']:.3f} to {found['p90_ms']:.3f})")

    def tell(self, text: str) -> None:
        """Print a line on rank 0."""
        if self._rank == 0:
            print(text, flush=True)

    def medians(self, *names: str) -> float:
        """Return the sum of the medians of rows."""
        return sum(self.rows[name]["median_ms"] for name in names)


def collectives(table: Table, tokens: int, asked: Any, size: int) -> None:
    """Time NCCL alone at a number of tokens."""
    whole, part = randn(tokens, asked.hidden), randn(tokens // size, asked.hidden)
    table.add(f"{tokens}: all-reduce", lambda: ALL_REDUCE.reference(whole, ""))
    table.add(f"{tokens}: reduce-scatter", lambda: REDUCE_SCATTER.reference(whole, ""))
    table.add(f"{tokens}: all-gather", lambda: ALL_GATHER.reference(part, ""))


def products(table: Table, tokens: int, names: tuple[str, ...], asked: Any, size: int) -> None:
    """Time the products of a layer in these ways."""
    group = distributed.group.WORLD.group_name
    for layer in layers(asked.hidden, asked.intermediate, size):
        weight, x = randn(layer.outer, layer.inner) * layer.inner**-0.5, randn(tokens, layer.inner)
        own = x[: tokens // size].contiguous() if layer.gathers else x
        for name in names:
            if name == ALONE:
                table.add(f"{tokens}: {layer.name}, {ALONE}", lambda x=x, weight=weight: functional.linear(x, weight))
                continue
            way = ways(layer.gathers, group)[name]
            table.add(f"{tokens}: {layer.name}, {name}", lambda own=own, weight=weight, way=way: way(own, weight))


def tell_gain(table: Table, tokens: int, split: tuple[str, ...], asked: Any, size: int) -> None:
    """Tell what the products and collectives of one layer take: sums whole, and split in each way."""
    names = [f"{tokens}: {layer.name}, " for layer in layers(asked.hidden, asked.intermediate, size)]
    today = table.medians(*(name + ALONE for name in names)) + 2 * table.medians(f"{tokens}: all-reduce")
    table.rows[f"{tokens}: layer, all-reduce"] = {"median_ms": today}
    table.tell(f"{tokens} tokens, a layer: {today:.3f} ms with all-reduces of NCCL")
    for way in split:
        found = table.medians(*(name + way for name in names))
        table.rows[f"{tokens}: layer, {way}"] = {"median_ms": found}
        table.tell(f"{'':8}{found:.3f} ms split, by {way}: {found / today - 1:+.1%}")


def main() -> None:
    """Time all on each rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,8192")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, default=28672)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory  # registers torch's fused ops

    core.select_device("cuda", int(os.environ["LOCAL_RANK"]))
    place = initialize("nccl")
    if reason := apart(""):
        raise SystemExit(f"these GPUs share no memory: {reason}")
    table = Table(place.rank)
    device = torch.cuda.get_device_name()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    table.tell(f"{place.size} x {device}, torch {torch.__version__}, NCCL {nccl}")
    numbers = tuple(map(int, asked.tokens.split(",")))
    with torch.no_grad():
        for tokens in numbers:
            collectives(table, tokens, asked, place.size)
        # torch's last: what was measured until then is told, and written, whatever a new version of them does.
        for names in ((ALONE, NCCL, OURS), (TORCH,)):
            for tokens in numbers:
                products(table, tokens, names, asked, place.size)
                tell_gain(table, tokens, tuple(each for each in names if each != ALONE), asked, place.size)
            if place.rank == 0 and asked.json is not None:
                found = {"device": device, "gpus": place.size, "rows": table.rows}
                asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
