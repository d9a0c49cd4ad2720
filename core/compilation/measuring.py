"""Which of several implementations a call of a canonical op gets: that which is fastest at the sizes of its bucket.

Each is timed on the device, once for calls that are alike, when a program is made: in a graph where the device captures
them, since a step has no launches then. What was timed is kept on disk with what lowerings keep, and is found again
for the same device, versions and implementations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from core.common.graphs.backend import GraphKey
from core.common.lowering import Artifacts
from core.common.ops.declaration import declared_ops
from core.compilation.implementations import OpChoice, bound_call
from core.errors import one_line

if TYPE_CHECKING:
    from core.common.ops.declaration import CanonicalOp
    from core.common.ops.implementation import OpImplementation
    from core.device import Device

MAX_SECONDS = 10.0
"""Of timing, for one graph; calls that come later get the implementation that the device prefers."""
_ROUNDS = 5
_BATCH_S = 0.002
"""What is timed in one go, at least: so many calls in a row."""
_MARGIN = 0.95
"""Of the time of the preferred implementation, what another may take at most to be chosen: clocks are noisy."""
_TIMES = "times.json"
_STD = 0.1
"""Standard deviation of the random numbers that floating tensors hold."""
Keep = Callable[[fx.GraphModule, tuple[Any, ...]], Artifacts]
"""Returns where to keep what is made of a graph with these values."""
Values = Mapping[fx.Node, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredChoice:
    """What alike calls of one bucket became, since it was the fastest."""

    op: str
    bucket: GraphKey
    #: The names of the calls in the graph.
    nodes: tuple[str, ...]
    implementation: str
    #: Microseconds of a call by implementation, the preferred one first; those that failed are left out.
    times_us: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """What a tensor is without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def make(self, device: torch.device) -> Tensor:
        """Return a tensor of this form: random numbers, or zeros where it holds integers."""
        size = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) if all(self.shape) else 0
        if not self.dtype.is_floating_point:
            memory = torch.zeros(size, dtype=self.dtype, device=device)
        else:
            generator = torch.Generator(device).manual_seed(0)
            memory = torch.empty(size, dtype=torch.float32, device=device).normal_(std=_STD, generator=generator)
            memory = memory.to(self.dtype)
        return memory.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class BucketValues:
    """What is known of a graph in one bucket."""

    #: what each symbol is
    sizes: Mapping[Any, int]
    #: the program's own tensors, by the placeholders that are bound to them
    values: Values


class Measurer:
    """Times the calls of one graph."""

    def __init__(self, device: Device, keep: Keep, note: Callable[[str], None]) -> None:
        """keep: where to keep the times of a call. note: takes what was not timed, or failed."""
        self._device = device
        self._keep = keep
        self._note = note
        self._left_s = MAX_SECONDS
        #: Calls that were timed; those whose times were found on disk are not counted.
        self.num_measured = 0

    def choose(
        self, graph: fx.GraphModule, choices: Sequence[OpChoice], buckets: Mapping[GraphKey, BucketValues]
    ) -> tuple[MeasuredChoice, ...]:
        """Return what the calls that several implementations take become in each bucket.

        graph: with the implementations that the device prefers in place. choices: how it came to them.
        """
        nodes = {node.name: node for node in graph.graph.nodes}
        # Each process of a group times for itself, and all have to make the same collectives.
        timed = [each for each in choices if each.others and not declared_ops()[each.op].is_collective]
        pending = [(choice, nodes[choice.node]) for choice in timed]
        found = []
        for bucket, given in buckets.items() if pending else ():
            alike: dict[str, list[OpChoice]] = {}
            arguments: dict[str, dict[str, Any]] = {}
            for choice, node in pending:
                fixed = _fixed(bound_call(node, declared_ops()[choice.op]).args, given.sizes)
                if fixed is not None:
                    key = f"{choice.op} {choice.implementation} {choice.others} {fixed}"
                    alike.setdefault(key, []).append(choice)
                    arguments.setdefault(key, fixed | _own(node, declared_ops()[choice.op], given.values))
            for key, calls in alike.items():
                times = self._times(calls[0], arguments[key])
                if times:
                    found.append(_fastest(bucket, calls, times))
        return tuple(found)

    def _times(self, choice: OpChoice, arguments: Mapping[str, Any]) -> dict[str, float]:
        """Return microseconds by implementation, from disk where they are known; nothing where time is up."""
        op, names = declared_ops()[choice.op], (choice.implementation, *choice.others)
        if self._left_s <= 0:
            self._note(f"{choice.op} takes the preferred implementation: timing others took {MAX_SECONDS:.0f} s before")
            return {}
        by_name = {each.name: each for each in self._device.ops if each.op == choice.op}
        device = self._device.torch_device
        real = {n: v.make(device) if isinstance(v, _Form) else v for n, v in arguments.items()}
        if op.indices is not None:
            real |= op.indices(real)
        kept = self._keep(_graph_of(op, real), tuple(v for v in real.values() if isinstance(v, Tensor)))
        factors = {"timed": " ".join(names), "threads": str(torch.get_num_threads())}
        found = kept.use(factors, partial(self._time, [by_name[name] for name in names], real), _read)
        for name, reason in found["failed"].items():
            self._note(f"{name} of {choice.op} is not used: it failed when it was timed: {reason}")
        return dict(found["us"])

    def _time(self, candidates: Sequence[OpImplementation], arguments: Mapping[str, Any], folder: Path) -> None:
        start = time.perf_counter()
        runs: dict[str, Callable[[], object]] = {}
        failed: dict[str, str] = {}
        with ExitStack() as graphs:
            for each in candidates:
                try:
                    runs[each.name] = self._ready(each, arguments, graphs)
                except Exception as error:  # of code that a library brings
                    failed[each.name] = f"{type(error).__name__}: {one_line(str(error))}"
            counts = {name: max(1, int(_BATCH_S / max(self._seconds(run, 1), 1e-7))) for name, run in runs.items()}
            best: dict[str, float] = dict.fromkeys(runs, float("inf"))
            for _ in range(_ROUNDS):  # in turns, as the clock of a device changes
                for name, run in runs.items():
                    best[name] = min(best[name], self._seconds(run, counts[name]) * 1e6)
        self.num_measured += 1
        self._left_s -= time.perf_counter() - start
        (folder / _TIMES).write_text(json.dumps({"us": best, "failed": failed}), encoding="utf-8")

    def _ready(
        self, implementation: OpImplementation, arguments: Mapping[str, Any], graphs: ExitStack
    ) -> Callable[[], object]:
        """Return what makes the call, warm: as a graph where the device captures them, which ends with `graphs`."""
        op = declared_ops()[implementation.op]
        args = [arguments[name] for name in op.positional]
        kwargs = {name: value for name, value in arguments.items() if name not in op.positional}

        def run() -> tuple[Tensor, ...]:
            with torch.no_grad():
                result = implementation.fn(*args, **kwargs)
            return result if isinstance(result, tuple) else (result,)

        run()
        if "full" not in self._device.capabilities.modes:
            return run
        backend, key = self._device.graph_backend(), GraphKey("timed", ())
        graphs.callback(backend.cleanup)
        with backend.capture_session():
            backend.capture_one(key, run, {}, self._device.synchronize)
        return partial(backend.replay, key)

    def _seconds(self, run: Callable[[], object], count: int) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        self._device.synchronize()
        return (time.perf_counter() - start) / count


def _fixed(arguments: Mapping[str, Any], sizes: Mapping[Any, int]) -> dict[str, Any] | None:
    """Return arguments with the sizes of a bucket, tensors as forms; None where a size is not known."""

    def size(value: Any) -> int:
        return int(value.node.expr.xreplace(dict(sizes))) if isinstance(value, torch.SymInt) else int(value)

    found: dict[str, Any] = {}
    try:
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                found[name] = _Form(
                    dtype=value.dtype, shape=tuple(map(size, value.shape)), stride=tuple(map(size, value.stride()))
                )
            else:
                found[name] = size(value) if isinstance(value, torch.SymInt) else value
    except TypeError:  # a symbol that no input has
        return None
    return found


def _own(node: fx.Node, op: CanonicalOp, values: Values) -> dict[str, Tensor]:
    """Return the arguments that are tensors of the program, such as weights and caches: these are not made anew.

    What the op writes is one of them only where its `indices` say where it writes to.
    """
    named = (*zip(op.positional, node.args, strict=False), *node.kwargs.items())
    found = {name: values.get(arg) for name, arg in named if isinstance(arg, fx.Node)}
    spared = () if op.indices is not None else op.mutates
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and name not in spared}


def _fastest(bucket: GraphKey, calls: Sequence[OpChoice], times: Mapping[str, float]) -> MeasuredChoice:
    """Return what these calls become; times: of some of the implementations that take them."""
    preferred, best = calls[0].implementation, min(times, key=times.__getitem__)
    keeps = preferred in times and times[best] >= _MARGIN * times[preferred]
    return MeasuredChoice(
        op=calls[0].op,
        bucket=bucket,
        nodes=tuple(each.node for each in calls),
        implementation=preferred if keeps else best,
        times_us=tuple(times.items()),
    )


def _graph_of(op: CanonicalOp, arguments: Mapping[str, Any]) -> fx.GraphModule:
    """Return a graph of this one call, by which its times are kept."""
    graph = fx.Graph()
    nodes = {n: graph.placeholder(n) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    args = tuple(nodes.pop(name) for name in op.positional)
    graph.output(graph.call_function(op.overload, args, nodes))
    return fx.GraphModule(torch.nn.Module(), graph)


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / _TIMES).read_text(encoding="utf-8"))
    return found
