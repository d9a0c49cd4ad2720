"""Time the cpu plugin's collectives through shared memory against gloo's, among processes pinned to a core each.

Both take turns in the same processes: a round times a run of calls of one, then of the other, and gives a ratio.
Figures are medians over rounds, with their 10th and 90th percentiles; rank 0's clock.

    python benchmarks/shared_memory_collectives.py [--processes 2] [--rounds 21] [--collective all_reduce] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from core.engine.models.distributed import initialize
from core_cpu import collectives
from core_cpu.shared_groups import join

SIZES = (1, 16, 64, 256, 1024, 4096, 16384, 65536)
"""Elements of a tensor, fp32."""
CALLS = {"shared memory": 200, "gloo": 20}
"""Calls in a round."""
_RANK = "RANK"


def _time(call: Callable[[Tensor, str], Tensor], x: Tensor, num_calls: int) -> float:
    """Return microseconds per call; the first waits for the other processes, and does not count."""
    call(x, "")
    start = time.perf_counter()
    for _ in range(num_calls):
        call(x, "")
    return (time.perf_counter() - start) / num_calls * 1e6


def _spread(values: list[float]) -> list[float]:
    deciles = statistics.quantiles(values, n=10)
    return [statistics.median(values), deciles[0], deciles[-1]]


def of_gloo(collective: str) -> Callable[[Tensor, str], Tensor]:
    """Return torch's functional collective and the wait for it, which compiled graphs call where nothing else is."""
    ops, group = torch.ops._c10d_functional, distributed.group.WORLD
    assert group is not None
    size, name = group.size(), group.group_name
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": lambda x: ops.all_reduce.default(x, "sum", name),
        "reduce_scatter": lambda x: ops.reduce_scatter_tensor.default(x, "sum", size, name),
        "all_gather": lambda x: ops.all_gather_into_tensor.default(x, size, name),
    }
    begin, wait = calls[collective], ops.wait_tensor.default
    return lambda x, _: wait(begin(x))


def measure(collective: str, rounds: int) -> list[dict[str, Any]]:
    """Return for each size the median, 10th and 90th percentile of both in us, and of the ratio of a round."""
    if reason := join(""):
        raise SystemExit(f"nothing to compare: {reason}")
    own, gloo = getattr(collectives, collective), of_gloo(collective)
    found = []
    for size in SIZES:
        # A reduce-scatter takes as many rows as there are processes.
        x = torch.ones(distributed.get_world_size(), size) if collective == "reduce_scatter" else torch.ones(size)
        times: dict[str, list[float]] = {name: [] for name in CALLS}
        for _ in range(rounds):
            for name, call in (("shared memory", own), ("gloo", gloo)):
                times[name].append(_time(call, x, CALLS[name]))
        ratios = [theirs / ours for ours, theirs in zip(*times.values(), strict=True)]
        spreads = {name: _spread(values) for name, values in times.items()}
        found.append({"elements": x.numel(), **spreads, "ratio": _spread(ratios)})
    return found


def _run(arguments: argparse.Namespace) -> None:
    """Measure as one of the processes; rank 0 prints."""
    place = initialize("gloo", timeout_s=300)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place.rank % len(cores)]})
    torch.set_num_threads(1)
    found = measure(arguments.collective, arguments.rounds)
    distributed.destroy_process_group()
    if place.rank:
        return
    about = {"torch": torch.__version__, "machine": platform.machine(), "cores": len(cores), "processes": place.size}
    if arguments.json:
        print(json.dumps({**about, "collective": arguments.collective, "rounds": arguments.rounds, "sizes": found}))
        return
    print(", ".join(f"{name} {value}" for name, value in about.items()), f"{arguments.collective} fp32", sep=", ")
    print(f"{'elements':>9}  {'shared memory, us':>24}  {'gloo, us':>28}  {'gloo / shared memory':>26}")
    for row in found:
        texts = [f"{m:.2f} ({low:.2f} to {high:.2f})" for m, low, high in (row[name] for name in (*CALLS, "ratio"))]
        print(f"{row['elements']:>9}  {texts[0]:>24}  {texts[1]:>28}  {texts[2]:>26}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--collective", choices=("all_reduce", "reduce_scatter", "all_gather"), default="all_reduce")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if _RANK in os.environ:
        _run(arguments)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.processes), __file__, *sys.argv[1:]]
    raise SystemExit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
