"""Measure what replaying graphs costs per step in Python, beyond the graph launches and the eager calls themselves.

A whole graph against the launch of the same graph alone; and a graph in parts with eager calls in between, against the
sum of its launches, its calls and the copies of their results. Variants take turns in one process.

    python benchmarks/parts_overhead.py [--device cuda] [--breaks 32] [--rounds 200]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from typing import Any

import torch
from step_overhead import medians

import core
from core.device import Device

WIDTH = 64
CALLS_PER_ROUND = 50


def timed(variants: dict[str, Callable[[], object]], rounds: int, device: Device) -> dict[str, float]:
    """Return the median microseconds of a call of each variant, timed in turns."""
    found = medians(variants, rounds, device, CALLS_PER_ROUND)
    return {name: figures["median_us"] for name, figures in found.items()}


def whole(device: Device, rounds: int) -> dict[str, float]:
    """Return the cost of replaying one whole graph through a program, and of its backend's replay alone."""
    x = {"x": core.InputSpec((8, WIDTH), torch.float32)}
    with core.capture(lambda x: x * 2, device, inputs=x, mode="full") as program:
        (key,) = program.keys
        backend: Any = program._runner._backend
        launch = _launch(backend, key)
        times = timed({"launch": launch, "replay": lambda: program.replay(key)}, rounds, device)
    return {**times, "python_us": times["replay"] - times["launch"]}


def parts(device: Device, num_breaks: int, rounds: int) -> dict[str, float]:
    """Return the cost of replaying a graph with breaks, and of its launches, calls and copies alone."""
    ready = torch.zeros(8, WIDTH, device=device.torch_device)

    @core.eager_break
    def attend(x: torch.Tensor, scale: float) -> torch.Tensor:
        return ready

    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_breaks):
            x = attend(x * 2, scale=0.5)
        return x + 1

    spec = {"x": core.InputSpec((8, WIDTH), torch.float32)}
    with core.capture(model, device, inputs=spec, mode="segmented") as program:
        (key,) = program.keys
        report = program.report().buckets[0]
        backend: Any = program._runner._backend
        launches = [_launch(backend, key._replace(part=part)) for part in range(report.num_graphs)]
        target = torch.empty_like(ready)

        def alone() -> None:
            for launch in launches:
                launch()

        def copies() -> None:
            for _ in range(num_breaks):
                target.copy_(ready)

        variants: dict[str, Callable[[], object]] = {
            "launches": alone,
            "copies": copies,
            "replay": lambda: program.replay(key),
        }
        times = timed(variants, rounds, device)
    cost = times["replay"] - times["launches"] - times["copies"]
    return {**times, "graphs": report.num_graphs, "eager calls": len(report.eager), "python_us": cost}


def _launch(backend: Any, key: Any) -> Callable[[], object]:
    """Return the bare launch of a captured graph: the device's own call, else the backend's replay."""
    graph = getattr(getattr(backend, "_graphs", {}).get(key), "graph", None)
    return graph.replay if graph is not None else lambda: backend.replay(key)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--breaks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = core.select_device(arguments.device)
    figures = {
        "environment": {
            "device": str(device),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rounds": arguments.rounds,
        },
        "whole": whole(device, arguments.rounds),
        "parts": parts(device, arguments.breaks, arguments.rounds),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
