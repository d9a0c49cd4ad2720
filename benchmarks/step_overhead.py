"""Measure what a compiled program costs per step in Python, beyond the bound graph and the input copies themselves.

The lowering is replaced by a stub that returns ready outputs, so that only `core`'s own work is timed; the same calls
are then timed on the embedded model. Variants take turns in one process; figures are medians over rounds.

    python benchmarks/step_overhead.py [--device cpu] [--rounds 200]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

import core
from core.common.lowering import FlatCallable, LoweringRequest, Lowerings
from core.compilation.program import Program
from core.device import Device

HIDDEN = 64
CALLS_PER_ROUND = 200


class Model(torch.nn.Module):
    """A model with as many weights as a few layers have, so that the number of bound arguments is realistic."""

    def __init__(self, num_layers: int = 24) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(num_layers))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + positions[:, None]


# The last bound graph: the stub and the arguments it is bound to. What a step costs beyond calling it is measured.
bound: list[Callable[[], object]] = []


def stub(request: LoweringRequest) -> FlatCallable:
    """Lower to a function that computes nothing and returns a ready output."""
    example = request.example_inputs
    output = (next(v for v in example if isinstance(v, torch.Tensor) and v.shape[-1:] == (HIDDEN,)).clone(),)

    def lowered(*_: Any) -> tuple[torch.Tensor, ...]:
        return output

    bound.append(lambda: lowered(*example))
    return lowered


def medians(
    variants: Mapping[str, Callable[[], object]], rounds: int, device: Device, num_calls: int = CALLS_PER_ROUND
) -> dict[str, dict[str, float]]:
    """Time each variant in turn and return median, 10th and 90th percentile in microseconds per call.

    Each round starts on an idle device, and ends when the host has made its calls.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            device.synchronize()
            start = time.perf_counter()
            for _ in range(num_calls):
                call()
            samples[name].append((time.perf_counter() - start) / num_calls * 1e6)
    return {
        name: {
            "median_us": statistics.median(values),
            "p10_us": statistics.quantiles(values, n=10)[0],
            "p90_us": statistics.quantiles(values, n=10)[-1],
        }
        for name, values in samples.items()
    }


def build(device: Device) -> Program:
    """Compile the stub model for one bucket of 8 rows."""
    return core.compile(
        Model().to(device.torch_device),
        device,
        inputs={
            "x": core.InputSpec(("rows", HIDDEN), torch.float32),
            "positions": core.InputSpec(("rows",), torch.int64),
        },
        buckets=[8],
    )


def variants(program: Program) -> dict[str, Callable[[], object]]:
    """Name the calls to compare: bound graph, replay, whole call, and the copies that a whole call can't avoid."""
    (key,) = program.keys
    buffers = program.inputs(key)
    full = {"x": torch.randn(8, HIDDEN), "positions": torch.arange(8)}
    full = {name: tensor.to(program.device.torch_device) for name, tensor in full.items()}
    part = {name: tensor[:5] for name, tensor in full.items()}
    views = {name: (tensor[:5], tensor[5:]) for name, tensor in buffers.items()}

    def copies() -> None:
        buffers["x"].copy_(full["x"])
        buffers["positions"].copy_(full["positions"])

    def copies_and_padding() -> None:
        for name, (real, padding) in views.items():
            real.copy_(part[name])
            padding.fill_(0)

    return {
        "bound graph": bound[-1],
        "replay": lambda: program.replay(key),
        "copies": copies,
        "call": lambda: program(**full),
        "copies and padding": copies_and_padding,
        "padded call": lambda: program(**part),
    }


def main() -> None:
    """Print the figures as JSON and the costs in one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = core.select_device(arguments.device)
    stubbed = replace(device, lowerings=Lowerings(available=MappingProxyType({"stub": stub}), default="stub"))
    with build(stubbed) as program:
        times = medians(variants(program), arguments.rounds, device)
    at = {name: figures["median_us"] for name, figures in times.items()}
    costs = {
        "replay beyond the bound graph": at["replay"] - at["bound graph"],
        "call beyond the bound graph and its copies": at["call"] - at["bound graph"] - at["copies"],
        "padded call beyond the bound graph, copies and fills": at["padded call"]
        - at["bound graph"]
        - at["copies and padding"],
    }
    environment = {
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": arguments.rounds,
        "calls_per_round": CALLS_PER_ROUND,
    }
    print(json.dumps({"environment": environment, "times": times, "cost_us": costs}, indent=2))
    for name, cost in costs.items():
        print(f"{name}: {cost:.2f} us")


if __name__ == "__main__":
    main()
