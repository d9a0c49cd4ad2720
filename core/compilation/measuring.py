"""Which of several implementations a call of a canonical op gets: that which is fastest at the sizes of its bucket.

Each is timed on the device, once for calls that are alike, when a program is made: in a graph where the device captures
them, since a step has no launches then. Short calls are timed one behind the other as a step makes them, each with the
weights and caches of its own layer: the same weights again and again would lie in the device's caches. What was timed
is kept on disk with what lowerings keep, and is found again for the same device, versions and implementations. Without
a compile cache the process keeps it: two programs of one model shall not differ in rounding by the noise of a clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from core.common.graphs.backend import GraphBackend, GraphKey
from core.common.lowering import UNKEPT, Artifacts
from core.common.ops.declaration import declared_ops
from core.compilation.implementations import OpChoice, asked, bound_call
from core.compilation.timed_calls import AlikeCalls, Arguments, Values, graph_of, in_bucket, own_tensors
from core.errors import one_line

if TYPE_CHECKING:
    from core.common.ops.implementation import OpImplementation
    from core.device import Device

MAX_SECONDS = 10.0
"""Of timing, for one graph; calls that come later get the implementation that the device prefers."""
_ROUNDS = 5
_BATCH_S = 0.002
"""What is timed in one go, at least: so many calls in a row."""
_FAR = 1.5
"""Times the least time so far, beyond which an implementation is not timed again."""
_MAX_BYTES = 2**26
"""Of results of the calls that are made one behind the other: a device's graphs may keep them all."""
_MARGIN = 0.95
"""Of the time of the preferred implementation, what another may take at most to be chosen: clocks are noisy."""
_TIMES = "times.json"
_KNOWN: dict[object, dict[str, dict[str, Any]]] = {}
"""What this process has timed without a cache on disk."""
Keep = Callable[[fx.GraphModule, tuple[Any, ...]], Artifacts]
"""Returns where to keep what is made of a graph with these values."""


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
        self._graphs: GraphBackend | None = None
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
            try:
                for calls in _alike(pending, given):
                    times = self._times(calls)
                    if times:
                        found.append(_fastest(bucket, calls.choices, times))
            finally:  # the next bucket's graphs may need the memory
                if self._graphs is not None:
                    self._graphs.cleanup()
                    self._graphs = None
        return tuple(found)

    def _times(self, calls: AlikeCalls) -> dict[str, float]:
        """Return microseconds by implementation, from disk where they are known; nothing where none is to be timed."""
        choice = calls.choices[0]
        op, by_name = declared_ops()[choice.op], {i.name: i for i in self._device.ops if i.op == choice.op}
        described = calls.described(op, self._device.torch_device)
        others = [name for name in choice.others if not asked(by_name[name], "timed", described)]
        if not others:
            return {}
        names, candidates = (choice.implementation, *others), [by_name[n] for n in (choice.implementation, *others)]
        like = f"{choice.op} {calls.fixed} {sorted(calls.own[0])} {len(calls.own)} {torch.get_num_threads()}"
        known = (self._device.name, like, *(each.fn for each in candidates))
        found = _KNOWN.get(known)
        if found is None and self._left_s <= 0:
            self._note(f"{choice.op} takes the preferred implementation: timing others took {MAX_SECONDS:.0f} s before")
            return {}
        if found is None:
            real = calls.made(op, self._device.torch_device)
            kept = self._keep(graph_of(op, real[0]), tuple(v for v in real[0].values() if isinstance(v, Tensor)))
            factors = {"timed": " ".join(names), "alike": str(len(real)), "threads": str(torch.get_num_threads())}
            found = kept.use(factors, partial(self._time, candidates, real), _read)
            if kept is UNKEPT:
                _KNOWN[known] = found
        for name, reason in found["failed"].items():
            self._note(f"{name} of {choice.op} is not used: it failed when it was timed: {reason}")
        return dict(found["us"])

    def _time(self, candidates: Sequence[OpImplementation], calls: Sequence[Arguments], folder: Path) -> None:
        start = time.perf_counter()
        runs: dict[str, Callable[[], object]] = {}
        failed: dict[str, str] = {}
        for each in candidates:
            try:
                one = _made(each, calls[:1])
                results = one()  # with whatever it compiles
                calls = calls if runs else calls[: self._num_short(one, sum(map(_num_bytes, results)))]
                del results
                runs[each.name] = self._ready(_made(each, calls), len(runs))
            except Exception as error:  # of code that a library brings
                failed[each.name] = f"{type(error).__name__}: {one_line(str(error))}"
        times = {name: each / len(calls) * 1e6 for name, each in self._least(runs).items()}
        self.num_measured += 1
        self._left_s -= time.perf_counter() - start
        (folder / _TIMES).write_text(json.dumps({"us": times, "failed": failed}), encoding="utf-8")

    def _least(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Return the least seconds of each run; those far slower than another one after two rounds take no more."""
        counts = {name: max(1, int(_BATCH_S / max(self._seconds(run, 1), 1e-7))) for name, run in runs.items()}
        best: dict[str, float] = dict.fromkeys(runs, float("inf"))
        for done in range(_ROUNDS):  # in turns, as the clock of a device changes
            near = [name for name in runs if done < 2 or best[name] <= _FAR * min(best.values())]
            if done >= 2 and len(near) == 1:
                break
            for name in near:
                best[name] = min(best[name], self._seconds(runs[name], counts[name]))
        return best

    def _num_short(self, run: Callable[[], object], num_bytes: int) -> int:
        """Return how many such calls, which return so many bytes each, are made one behind the other."""
        return max(1, min(int(_BATCH_S / max(self._seconds(run, 1), 1e-7)), _MAX_BYTES // max(num_bytes, 1)))

    def _ready(self, run: Callable[[], tuple[Tensor, ...]], place: int) -> Callable[[], object]:
        """Return what makes the calls, warm: as a graph where the device captures them, until the next of that
        place."""
        run()
        if "full" not in self._device.capabilities.modes:
            return run
        self._graphs = self._graphs or self._device.graph_backend()
        key = GraphKey("timed", (place,))
        with self._graphs.capture_session():
            self._graphs.capture_one(key, run, {}, self._device.synchronize)
        return partial(self._graphs.replay, key)

    def _seconds(self, run: Callable[[], object], count: int) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        self._device.synchronize()
        return (time.perf_counter() - start) / count


def _num_bytes(result: object) -> int:
    return result.numel() * result.element_size() if isinstance(result, Tensor) else 0


def _alike(pending: Sequence[tuple[OpChoice, fx.Node]], given: BucketValues) -> Iterable[AlikeCalls]:
    """Return these calls by what they are in a bucket; those are left out whose sizes are not known there."""
    alike: dict[str, AlikeCalls] = {}
    for choice, node in pending:
        op = declared_ops()[choice.op]
        fixed = in_bucket(bound_call(node, op).args, given.sizes)
        if fixed is not None:
            own = own_tensors(node, op, given.values)
            key = f"{choice.op} {choice.implementation} {choice.others} {sorted(own)} {fixed}"
            alike.setdefault(key, AlikeCalls(fixed)).add(choice, own)
    return alike.values()


def _made(implementation: OpImplementation, calls: Sequence[Arguments]) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that makes calls one behind the other, and returns the results of the last."""
    positional = declared_ops()[implementation.op].positional
    args = [[each[name] for name in positional] for each in calls]
    kwargs = [{name: value for name, value in each.items() if name not in positional} for each in calls]

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            for mine, named in zip(args, kwargs, strict=True):
                result = implementation.fn(*mine, **named)
        return result if isinstance(result, tuple) else (result,)

    return run


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


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / _TIMES).read_text(encoding="utf-8"))
    return found
