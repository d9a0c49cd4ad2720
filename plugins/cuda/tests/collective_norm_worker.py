"""One of two processes, each with a GPU, that sum and normalise by the kernels of `core_cuda.collective_norm`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import DeviceType

import core
from core.common.numerics import MIN_ELEMENTS, Fp64Mode, judge, judge_pooled
from core.common.ops.collective import ALL_REDUCE, ALL_REDUCE_ADD_RMS_NORM, ALL_REDUCE_RMS_NORM
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core.engine.models.distributed import Processes, initialize
from core_cuda.collective import all_reduce
from core_cuda.collective_norm import all_reduce_add_rms_norm, all_reduce_rms_norm
from core_cuda.symmetric import join

TOKENS, HIDDEN = (1, 3, 16, 64, 100, 512), (64, 4096, 5120, 8192)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
CHAINED = ((1, 8192), (512, 4096), (3, 64), (100, 5120), (1, 64), (300, 8192))
REPLAYS, DELAYS = 200, 40


def randn(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return (made * scale + shift).to(dtype)


def call_of(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int = 0) -> dict[str, Any]:
    """Return a call; x is another on each rank."""
    weight = randn(shape[-1], dtype=dtype, seed=seed + 7, scale=0.4, shift=1.0)
    x, residual = randn(*shape, dtype=dtype, seed=seed + 10 + rank), randn(*shape, dtype=dtype, seed=seed + 8)
    return {"x": x, "residual": residual, "weight": weight, "eps": 1e-5, "group": "", "normed_dtype": dtype}


def listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def exact(call: Mapping[str, Any], size: int, gathered: list[Tensor]) -> list[Tensor]:
    """Return what fp64 gives."""
    wide = {name: v.double() if isinstance(v, Tensor) else v for name, v in call.items() if name != "group"}
    wide["x"] = torch.stack([part.double() for part in gathered]).sum(0)
    with Fp64Mode():
        return listed((ADD_RMS_NORM if "residual" in wide else RMS_NORM).reference(**wide))


def everybodys(own: Tensor, size: int) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(size)]
    distributed.all_gather(found, own.contiguous())
    return found


def judged(place: Processes) -> dict[str, str]:
    """Return what was wrong about calls of any size: numbers by criterion T1, and bits that differ between ranks."""
    faults, small = {}, {dtype: [] for dtype in DTYPES}
    for tokens, hidden, dtype in product(TOKENS, HIDDEN, DTYPES):
        call = call_of((tokens, hidden), dtype, place.rank)
        alone = {name: value for name, value in call.items() if name != "residual"}
        for op, kernel, given in (
            (ALL_REDUCE_ADD_RMS_NORM, all_reduce_add_rms_norm, call),
            (ALL_REDUCE_RMS_NORM, all_reduce_rms_norm, alone),
        ):
            name = f"{op.name} {tokens} x {hidden} {dtype}"
            ours, eager = listed(kernel(**given)), listed(op.reference(**given))
            wanted = exact(given, place.size, everybodys(given["x"], place.size))
            if not all(torch.equal(each, part) for part in ours for each in everybodys(part, place.size)):
                faults[f"{name}, ranks"] = "other bits"
            for triple in zip(*([t.cpu() for t in part] for part in (ours, eager, wanted)), strict=True):
                if triple[0].numel() < MIN_ELEMENTS:
                    small[dtype].append(triple)
                elif not (verdict := judge(*triple)).passed:
                    faults[name] = str(verdict)
    for dtype, triples in small.items():
        if triples and not (verdict := judge_pooled(*zip(*triples, strict=True))).passed:
            faults[f"small {dtype}"] = str(verdict)
    return faults


def options(place: Processes) -> dict[str, bool]:
    """Return, by case, whether calls that are unlike most are right."""
    found = {}
    base = call_of((16, 4096), torch.bfloat16, place.rank)
    memory = randn(16 * 4096 + 1, dtype=torch.bfloat16, seed=20 + place.rank)
    cases = {
        "transposed": base | {"x": base["x"].t().contiguous().t(), "residual": base["residual"].t().contiguous().t()},
        "odd address": base | {"x": memory[place.rank :][: 16 * 4096].view(16, 4096)},
        "gemma": base | {"offset": 1.0, "weight_dtype": torch.float32, "normed_dtype": None},
        "no weight": base | {"weight": None},
        "wide residual, wide weight": base | {n: base[n].float() for n in ("residual", "weight")},
        "odd width": call_of((7, 333), torch.bfloat16, place.rank),
        "three dimensions": call_of((2, 5, 4096), torch.bfloat16, place.rank),
        "too large": call_of((1024, 8192), torch.bfloat16, place.rank),
    }
    for name, call in cases.items():
        ours, wanted = all_reduce_add_rms_norm(**call), ALL_REDUCE_ADD_RMS_NORM.reference(**call)
        close = torch.allclose(ours[0].float(), wanted[0].float(), rtol=2e-2, atol=2e-2)
        found[name] = close and torch.equal(ours[1], wanted[1]) and ours[0].stride() == wanted[0].stride()
    x = torch.zeros(3, 1000, dtype=torch.bfloat16, device="cuda")
    x.view(torch.int16)[1] = -1  # the NaN by which the kernel knows what is still to come
    total = all_reduce(x, "")
    found["every NaN"] = bool(total[1].isnan().all()) and not bool(total[::2].any())
    return found


def chain(calls: list[dict[str, Any]]) -> list[Tensor]:
    """Sum in calls of many sizes one behind the other, plain ones among them."""
    made: list[Tensor] = []
    for call in calls:
        made += (*all_reduce_add_rms_norm(**call), all_reduce(call["x"], ""), all_reduce_rms_norm(**without(call)))
    return made


def without(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "residual"}


def captured(calls: list[dict[str, Any]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain(calls)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, chain(calls)


def replayed(place: Processes, times: int, before: Callable[[int], None]) -> int:
    """Return how many replays of a graph, each with other input, gave other bits than calls and than NCCL's sums."""
    calls = [call_of(shape, torch.bfloat16, place.rank) for shape in CHAINED]
    graph, found = captured(calls)
    wrong = 0
    for turn in range(times):
        for number, call in enumerate(calls):
            call["x"].copy_(randn(*call["x"].shape, dtype=torch.bfloat16, seed=1000 * turn + 10 * number + place.rank))
        before(turn)
        graph.replay()
        right = all(torch.equal(each, again) for each, again in zip(found, chain(calls), strict=True))
        for number, call in enumerate(calls):
            total = ALL_REDUCE.reference(call["x"], "")
            right &= torch.equal(found[4 * number + 2], total)
            right &= torch.equal(found[4 * number + 1], total + call["residual"])
        wrong += not right
    return wrong


def kernels(place: Processes) -> list[str]:
    """Return the names of the kernels that a call launches."""
    call = call_of((128, 8192), torch.bfloat16, place.rank)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        all_reduce_add_rms_norm(**call)
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages() if event.device_type == DeviceType.CUDA]


def main() -> None:
    """Do all, and print JSON of all ranks on rank 0."""
    core.select_device("cuda", int(os.environ["LOCAL_RANK"]))
    place = initialize("nccl", timeout_s=120)

    def late(turn: int) -> None:
        """Let one GPU come late, and the other the next time: up to about 3 ms."""
        if turn % place.size == place.rank:
            torch.cuda._sleep(100_000 * (turn + 1))

    own = {
        "joined": join(""),
        "faults": judged(place),
        "options": options(place),
        "kernels": kernels(place),
        "wrong_replays": replayed(place, REPLAYS, lambda turn: None),
        "wrong_when_late": replayed(place, DELAYS, late),
    }
    results: list[Any] = [None] * place.size
    distributed.all_gather_object(results, own)
    if place.rank == 0:
        sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
