"""One process of several whose collectives go through shared memory; the first argument says what it does."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import core
from core.common.numerics import judge_pooled
from core.engine.models.distributed import Processes, initialize
from core_cpu import shared_groups
from core_cpu.collectives import SUMMED, all_gather, all_reduce, reduce_scatter
from core_cpu.shared_groups import SLOT_BYTES, join
from tests.common.processes import drawn

SIZES = (1, 7, 4097, SLOT_BYTES // 2 + 3)
CALLS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "all_reduce": (all_reduce, torch.ops.core.all_reduce),
    "reduce_scatter": (reduce_scatter, torch.ops.core.reduce_scatter),
    "all_gather": (all_gather, torch.ops.core.all_gather),
}


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def memory() -> list[str]:
    """Return the shared memory that this process has open."""
    files = [f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd")]
    return [name for file in files if os.path.lexists(file) and "core_cpu-" in (name := os.readlink(file))]


def against_gloo(place: Processes) -> list[str]:
    """Return which sums are further from fp64 than T1 allows by those of gloo, and which numbers else are not its."""
    wrong = []
    for dtype in SUMMED:
        xs = [(drawn(place.size, count, seed=place.rank) * 9).to(dtype) for count in SIZES]
        for name, (own, canonical) in CALLS.items():
            got, eager = [own(x, "") for x in xs], [canonical(x, "") for x in xs]
            equal = all(map(torch.equal, got, eager))
            if dtype.is_floating_point and name != "all_gather":
                exact = [canonical(x.double(), "") for x in xs]
                equal = equal or judge_pooled(got, eager, exact).passed
            wrong += [] if equal else [f"{name} {dtype}"]
    return wrong


def sums(place: Processes) -> dict[str, str]:
    """Return digests of sums, which are to be the same in every process."""
    found = {}
    for dtype in SUMMED:
        x = (drawn(3, 5001, seed=place.rank) * 9).to(dtype)
        found[str(dtype)] = digest(all_reduce(x, ""))
    return found


def many(place: Processes, count: int) -> int:
    """Return how many of `count` small sums are wrong."""
    x, num_wrong = torch.empty(16), 0
    for i in range(count):
        x.fill_(i * (place.rank + 1))
        num_wrong += all_reduce(x, "")[i % 16].item() != i * place.size * (place.size + 1) // 2
    return num_wrong


def groups(place: Processes) -> dict[str, Any]:
    """Join groups beside the default one, made and destroyed, and of some of the processes only."""
    found: dict[str, Any] = {"open": [len(memory())], "moved": []}
    for _ in range(3):
        pair = distributed.new_group([0, 1])
        if place.rank < 2:
            name = pair.group_name
            assert join(name) == "" and join(name) == ""
            found["moved"].append(all_gather(torch.tensor([place.rank]), name).tolist())
            found["open"].append(len(memory()))
            distributed.destroy_process_group(pair)
            del pair
            gc.collect()
        found["open"].append(len(memory()))
        distributed.barrier()
    return found


def forked() -> str:
    """Return what a forked process is told that goes on with its parent's group."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            all_reduce(torch.ones(1), "")
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        return told.read()


def numbers(place: Processes) -> dict[str, Any]:
    found: dict[str, Any] = {"joined": join(""), "wrong": against_gloo(place), "sums": sums(place)}
    found |= {"num_wrong": many(place, 100_000 if place.size == 2 else 2_000), "groups": groups(place)}
    return found | {"forked": forked(), "after": all_reduce(torch.ones(1), "").item()}


class Layers(nn.Module):
    """Layers whose parts lie with the processes, with each of the collectives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.ops.core.all_reduce(self.up(x).relu(), "")
        part = torch.ops.core.reduce_scatter(self.down(x).relu(), "", 0)
        return torch.ops.core.all_gather(part.sin(), "", 0)


def compiled(place: Processes, num_calls: int, *, cache: bool = False) -> dict[str, Any]:
    """Compile by Inductor, and compare all calls with the eager model, whose collectives are gloo's."""
    model = Layers().eval()
    options = core.CompileOptions(lowering="inductor", cache=cache)
    inputs = {"x": core.InputSpec(("n", 16), torch.float32)}
    program = core.compile(model, "cpu", inputs=inputs, buckets=[4], options=options)
    num_wrong = 0
    with torch.no_grad():
        xs = [drawn(4, 16, seed=i + place.rank).float() for i in range(4)]
        wanted = [model(x) for x in xs]
        for i in range(num_calls):
            num_wrong += not torch.allclose(program(x=xs[i % 4]), wanted[i % 4], rtol=1e-5, atol=1e-5)
    report = program.report()
    choices = [choice for each in report.traces for choice in each.ops if choice.op.removeprefix("core::") in CALLS]
    chosen = sorted({(choice.op, choice.implementation) for choice in choices})
    found = {"num_wrong": num_wrong, "notes": report.notes, "chosen": chosen, "joined": join("")}
    return found | {"kernels": report.counters["kernels"], "open": len(memory())}


def elsewhere(place: Processes) -> dict[str, Any]:
    """Do the same as if rank 1 were on another machine: what rank 0 names is not there."""
    if place.rank == 1:
        shared_groups._open_that_of = _not_here
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    shared_groups.log.addHandler(handler)
    # Enough for what was seen to hang within the first few hundred.
    found = compiled(place, 600)
    return found | {"said": said, "own": all_reduce(torch.ones(2), "").tolist()}


def _not_here(told: str, _open: Callable[[str], int] = shared_groups._open_that_of) -> int:
    """Look for the file in a process that has another one of that number, or none."""
    return _open(f"{os.getpid()} {told.partition(' ')[2]}")


def dead(place: Processes) -> dict[str, Any]:
    """End one process between two sums; one that it has forked lives on."""
    assert join("") == ""
    all_reduce(torch.ones(1), "")
    store: Any = distributed.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    if place.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(120)
            os._exit(0)
        store.set("child", str(child))
        sys.stdout.write("{}\n")
        sys.stdout.flush()
        os._exit(0)
    child = int(store.get("child"))
    try:
        all_reduce(torch.ones(1), "")
    except RuntimeError as error:
        state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(child, 9)
        return {"error": str(error), "forked": state}
    return {}


DOES: dict[str, Callable[[Processes], dict[str, Any]]] = {
    "numbers": numbers,
    "compiled": lambda place: compiled(place, 200, cache=True),
    "elsewhere": elsewhere,
    "dead": dead,
}

if __name__ == "__main__":
    results = DOES[sys.argv[1]](initialize("gloo", timeout_s=120))
    sys.stdout.write(f"{json.dumps(results)}\n")
    sys.stdout.flush()
    if sys.argv[1] != "dead":
        distributed.destroy_process_group()
