"""One rank that calls what the simulated HCCL offers, eagerly and captured, and prints what came as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found, unused-ignore]  # noqa: F401  # brings the backend
from torch import Tensor, distributed

from simulator import runtime

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8)
OPS = ("SUM", "PRODUCT", "MIN", "MAX")


def drawn(dtype: torch.dtype, rank: int) -> Tensor:
    """Return the values of a rank: odd in number, of both signs, some with more digits than half precision has."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(37, generator=generator) * 3
    values[:4] = torch.tensor([0.0, -0.0, 2.0**-20, 300.0]) * (rank + 1)
    return values.to(dtype) if dtype.is_floating_point else values.round().to(dtype)


def reductions(rank: int) -> dict[str, list[float]]:
    found = {}
    for dtype in DTYPES:
        for op in OPS:
            x = drawn(dtype, rank).npu()
            distributed.all_reduce(x, getattr(distributed.ReduceOp, op))
            found[f"{dtype} {op}"] = x.cpu().double().tolist()
    return found


def moves(rank: int, size: int) -> dict[str, Any]:
    x = torch.arange(6.0).npu() + 10 * rank
    functional: Any = torch.ops._c10d_functional
    group: Any = distributed.group.WORLD

    def done(y: Tensor) -> list[float]:
        return list(functional.wait_tensor(y).cpu().tolist())

    found: dict[str, Any] = {
        "all_gather": done(functional.all_gather_into_tensor(x, size, group.group_name)),
        "bytes": done(functional.all_gather_into_tensor(x[:1].to(torch.uint8), size, group.group_name)),
        "reduce_scatter": done(functional.reduce_scatter_tensor(x, "sum", size, group.group_name)),
    }
    for name, call in {
        "broadcast": lambda y: distributed.broadcast(y, size - 1),
        "reduce": lambda y: distributed.reduce(y, 0),
        "no elements": lambda y: distributed.all_reduce(y[:0]),
    }.items():
        y = x.clone()
        call(y)
        found[name] = y.cpu().tolist()
    if size == 2:
        first, second = (distributed.send, distributed.recv)[:: 1 - 2 * rank]
        y = x.clone()
        first(y, 1 - rank)
        second(y, 1 - rank)
        found["there and back"] = y.cpu().tolist()
    other = distributed.new_group(list(range(size)))
    y = x.clone()
    distributed.all_reduce(y, group=other)
    found["another group"] = y.cpu().tolist()
    distributed.barrier()
    return found


def captured(rank: int) -> dict[str, Any]:
    """Capture a kernel, a sum over ranks and a kernel; replay with new inputs, two replays before anyone waits."""
    group: Any = distributed.group.WORLD
    functional: Any = torch.ops._c10d_functional
    x, stream, graph = torch.ones(8, device="npu", dtype=torch.bfloat16), torch.npu.Stream(), torch.npu.NPUGraph()

    def step() -> Tensor:
        total = functional.wait_tensor(functional.all_reduce(x * 2, "sum", group.group_name))
        return total + 1  # type: ignore[no-any-return]

    with torch.npu.stream(stream):
        step()
    torch.npu.synchronize()
    runtime.clear()
    with torch.npu.graph(graph, stream=stream):
        out = step()
    kernels, got = runtime.kernels("capture"), []
    for value in range(3):
        for each in (100, value):
            x.fill_(each + rank)
            graph.replay()
        torch.npu.synchronize()
        got.append(out.cpu().tolist()[0])
    return {"kernels": kernels, "ran": runtime.kernels("run").count("HcclAllReduce"), "got": got}


def apart(rank: int) -> list[float]:
    """Let rank 0 wait for a sum whose second half rank 1 queues before it waits for rank 0 by other means."""
    store: Any = distributed.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    x = torch.ones(2, device="npu")
    for _ in range(2):
        distributed.all_reduce(x)
    if rank == 0:
        torch.npu.synchronize()
        store.set("done", "")
    else:
        store.wait(["done"])
    return list(x.cpu().tolist())


def wrong(rank: int, case: str) -> str:
    """Return the error of a collective that this rank, or the other one, does not call as it should."""
    x = torch.ones(4 + (rank if case == "sizes" else 0), device="npu")
    if case == "gone" and rank == 1:
        return ""
    if case == "late" and rank == 1:
        time.sleep(3)
    try:
        distributed.all_reduce(x)
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def main(case: str) -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    distributed.init_process_group("hccl", timeout=timedelta(seconds=60))
    if case != "right":
        distributed.barrier()
        return {"error": wrong(rank, case)}
    found = {"reductions": reductions(rank), "moves": moves(rank, size), "captured": captured(rank)}
    found |= {"apart": apart(rank), "kinds": sorted({event.kind for event in runtime.log()})}
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(main(*sys.argv[1:]))}\n")
    sys.stdout.flush()
    if sys.argv[1] != "right":
        os._exit(0)  # a communicator that has failed is left with its process
