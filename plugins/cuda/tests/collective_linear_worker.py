"""One of two or more processes, each with a GPU, that multiply by the ops of `core_cuda.collective_linear`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, distributed

import core
from core.common.numerics import judge
from core.common.ops.collective import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER
from core.engine.models.distributed import Processes, initialize
from core_cuda import exchange
from core_cuda.collective_linear import all_gather_linear, linear_reduce_scatter
from core_cuda.symmetric import apart

PARTS = (1, 7, 128, 512)
WIDTHS = ((64, 96), (2048, 1024), (1024, 4096))
"""Of x and of the result."""
DTYPES = (torch.bfloat16, torch.float16)
CHAINED = ((256, 1024, 2048), (64, 1024, 1024), (7, 64, 96), (256, 2048, 1024))
REPLAYS, DELAYS = 200, 40
Call = dict[str, Any]


def randn(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return (made * scale).to(dtype)


def call_of(tokens: int, widths: tuple[int, int], dtype: torch.dtype, rank: int, *, bias: bool) -> Call:
    """Return a call; everything is another on each rank."""
    inner, outer = widths
    weight = randn(outer, inner, dtype=dtype, seed=tokens + 100 + rank, scale=inner**-0.5)
    own = randn(outer, dtype=dtype, seed=tokens + 200 + rank) if bias else None
    return {"x": randn(tokens, inner, dtype=dtype, seed=tokens + rank), "weight": weight, "bias": own, "group": ""}


def both(call: Call, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the two ops give, the second of the gathered rows with this rank's weight."""
    result, gathered = all_gather_linear(**call)
    return result, gathered, linear_reduce_scatter(**{**call, "x": gathered})


def judged(place: Processes) -> tuple[int, dict[str, str]]:
    """Return how many results were judged, and what was wrong with them by criterion T1 against fp64."""
    count, faults = 0, {}
    for tokens, widths, dtype, bias in product(PARTS, WIDTHS, DTYPES, (False, True)):
        call = call_of(tokens, widths, dtype, place.rank, bias=bias)
        result, gathered, scattered = both(call, place.size)
        eager, whole = ALL_GATHER_LINEAR.reference(**call)
        eager_sum = LINEAR_REDUCE_SCATTER.reference(**{**call, "x": whole})
        wide = {name: None if call[name] is None else call[name].double() for name in ("weight", "bias")}
        exact = torch.nn.functional.linear(whole.double(), **wide)
        total = exact.clone()
        distributed.all_reduce(total)
        name = f"{tokens} x {widths} {dtype} {bias}"
        if not torch.equal(gathered, whole):
            faults[f"{name}, gathered"] = "other bits"
        own = total.chunk(place.size)[place.rank]
        for op, triple in {"gather": (result, eager, exact), "scatter": (scattered, eager_sum, own)}.items():
            if triple[0].numel() >= 64:
                count += 1
                if not (verdict := judge(*(each.cpu() for each in triple))).passed:
                    faults[f"{name}, {op}"] = str(verdict)
    return count, faults


def replayed(place: Processes, times: int, before: Callable[[int], None]) -> int:
    """Return how many replays of a graph of many calls, each time with other input, gave other bits than the calls."""
    calls = [call_of(m, (k, n), torch.bfloat16, place.rank, bias=False) for m, k, n in CHAINED]

    def chain() -> list[Tensor]:
        return [each for call in calls for each in both(call, place.size)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        found = chain()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    wrong = 0
    for turn in range(times):
        for number, call in enumerate(calls):
            call["x"].copy_(randn(*call["x"].shape, dtype=torch.bfloat16, seed=1000 * turn + 10 * number + place.rank))
        before(turn)
        graph.replay()
        wanted = chain()
        wrong += not all(torch.equal(each, other) for each, other in zip(found, wanted, strict=True))
    torch.cuda.synchronize()
    graph.reset()
    exchange.release(side.cuda_stream)
    return wrong


def by_copies(place: Processes) -> bool:
    """Tell whether a call runs no kernel of NCCL, and copies between GPUs."""
    call = call_of(512, (2048, 1024), torch.bfloat16, place.rank, bias=False)
    both(call, place.size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        both(call, place.size)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    return not any("nccl" in name.lower() for name in names) and any("Memcpy" in name for name in names)


def main() -> None:
    """Do all, and print JSON of all ranks on rank 0."""
    core.select_device("cuda", int(os.environ["LOCAL_RANK"]))
    place = initialize("nccl", timeout_s=120)

    def late(turn: int) -> None:
        """Let one GPU come late, and the next one the next time: up to about 3 ms."""
        if turn % place.size == place.rank:
            torch.cuda._sleep(100_000 * (turn + 1))

    reason = apart("")
    num_judged, faults = judged(place)
    own = {
        "apart": reason,
        "num_judged": num_judged,
        "faults": faults,
        "by_copies": by_copies(place),
        "wrong_replays": replayed(place, REPLAYS, lambda turn: None),
        "wrong_when_late": replayed(place, DELAYS, late),
    }
    held, stream = exchange.held_bytes(), torch.cuda.current_stream().cuda_stream
    torch.cuda.synchronize()
    freed = exchange.release(stream)
    own["held_bytes"], own["freed_bytes"] = [held, exchange.held_bytes()], freed
    results: list[Any] = [None] * place.size
    distributed.all_gather_object(results, own)
    if place.rank == 0:
        sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
