"""Running a finished graph node by node: what each must move, and the kernels that ran in its time."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from core.compilation.trace.traced import TracedGraph
from core.explain.moves import Moved, moved

if TYPE_CHECKING:
    from core.device import Device

_PREFIX = "core.node "
DEVICE, HOST = "kernels of the device", "ops of the host"
_RANGE = re.compile(_PREFIX + r"(\d+) (\d+)")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The kernels of one name that a node runs: how many, and the microseconds of all of them."""

    name: str
    count: int
    us: float


class _Runner(fx.Interpreter):
    """Runs a graph node by node and shows each call with its arguments and its result."""

    def __init__(self, module: fx.GraphModule, around: Callable[[fx.Node, Callable[[], Any]], Any]) -> None:
        super().__init__(module)
        self._around = around

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            return super().run_node(n)
        return self._around(n, lambda: super(_Runner, self).run_node(n))


def measure_moves(traced: TracedGraph, inputs: Mapping[str, Tensor], ops: Mapping[str, str]) -> dict[str, Moved]:
    """Run the graph once and return what each call must move and compute. This run warms up, too."""
    found: dict[str, Moved] = {}

    def around(node: fx.Node, run: Callable[[], Any]) -> Any:
        args, kwargs = runner.fetch_args_kwargs_from_env(node)
        result = run()
        found[node.name] = moved(ops[node.name], args, kwargs, result)
        return result

    runner = _Runner(traced.module, around)
    with torch.no_grad():
        runner.run(*traced.values(inputs))
    return found


def measure_times(
    traced: TracedGraph, inputs: Mapping[str, Tensor], device: Device, repeats: int
) -> tuple[dict[str, tuple[KernelTime, ...]], str]:
    """Return the kernels of each node that runs any, and whose times these are."""
    names = {node.name: index for index, node in enumerate(traced.module.graph.nodes)}
    repeat = 0

    def around(node: fx.Node, run: Callable[[], Any]) -> Any:
        with torch.profiler.record_function(f"{_PREFIX}{repeat} {names[node.name]}"):
            result = run()
            device.synchronize()
        return result

    runner = _Runner(traced.module, around)
    values = traced.values(inputs)
    device.synchronize()
    with torch.no_grad(), torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
        for repeat in range(repeats):  # noqa: B007  # `around` reads it
            runner.run(*values)
    runs, source = by_node(list(profiler.events() or ()))
    found: dict[str, tuple[KernelTime, ...]] = {}
    for name, index in names.items():
        each = [_by_name(runs[number, index]) for number in range(repeats) if (number, index) in runs]
        if each:
            found[name] = tuple(
                KernelTime(kernel, len(last), statistics.median(sum(run.get(kernel, ())) for run in each))
                for kernel, last in each[-1].items()
            )
    return found, source


def _by_name(kernels: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, us in kernels:
        found.setdefault(name, []).append(us)
    return found


def by_node(events: Sequence[Any]) -> tuple[dict[tuple[int, int], list[tuple[str, float]]], str]:
    """Return by (run, node) the kernels with their microseconds, and whose these are.

    events: of torch.profiler. Kernels of the device where there are any, else the ops of the host by their own time.
    """
    host = torch._C._autograd.DeviceType.CPU
    ranges = []
    for event in events:
        match = _RANGE.fullmatch(event.name)
        if match is not None and event.device_type == host:
            ranges.append((event.time_range.start, event.time_range.end, (int(match[1]), int(match[2])), event))
    ranges.sort(key=lambda each: each[0])
    found: dict[tuple[int, int], list[tuple[str, float]]] = {}
    starts = [start for start, *_ in ranges]
    kernels = [e for e in events if e.device_type != host and not e.name.startswith(_PREFIX)]
    for kernel in sorted(kernels, key=lambda each: each.time_range.start):
        at = bisect_right(starts, kernel.time_range.start) - 1
        if at >= 0 and kernel.time_range.start <= ranges[at][1]:
            found.setdefault(ranges[at][2], []).append((kernel.name, kernel.time_range.elapsed_us()))
    if kernels:
        return found, DEVICE
    for _, _, key, event in ranges:
        inside = [(each.name, each.self_cpu_time_total) for each in _descendants(event)]
        if inside:
            found[key] = inside
    return found, HOST


def _descendants(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        yield child
        yield from _descendants(child)
