"""Faults of capture and replay: each class takes the place of the honest graph backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from core.common.graphs import recorder
from core.common.graphs.backend import WHOLE, BoundCallable, Callback, GraphKey
from core.common.graphs.tape import Tape
from torch import Tensor

from core_acme.faults import tapes
from core_acme.host_arguments import HostRecording
from core_acme.runner import RecordingBackend

Backend = type[RecordingBackend]
Fault = Callable[[Backend], Backend]
Tensors = tuple[Tensor, ...]

_LATE: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
_KEPT: list[Tape] = []


def instead(backend: Backend) -> Fault:
    """Make a class the fault of its name: it takes the place of the honest one."""
    return lambda honest: backend


def _captured(spoil: Callable[[Tape, Mapping[str, Tensor], Tensors], None]) -> Fault:
    """Make a function the fault of its name: it spoils the tape of each callable captured, given inputs and outputs."""

    class Spoiled(RecordingBackend):
        def capture_one(
            self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, Tensor], after_warmup: Callback
        ) -> Tensors:
            outputs = super().capture_one(key, fn, inputs, after_warmup)
            spoil(self._graphs[key].tape, inputs, outputs)
            return outputs

    return instead(Spoiled)


def spoiling(spoil: Callable[[Tape], None]) -> Fault:
    """Make a function the fault of its name: it spoils each tape before the backend keeps it."""

    class Spoiled(RecordingBackend):
        def _keep(self, key: GraphKey, tape: Tape) -> None:
            spoil(tape)
            super()._keep(key, tape)

    return instead(Spoiled)


@_captured
def replay_stale_input(tape: Tape, inputs: Mapping[str, Tensor], outputs: Tensors) -> None:
    """Make an input contiguous, or of another dtype, once: at capture."""
    tapes.copy_arguments(tape, list(inputs.values())[-1:])


@_captured
def replay_weights(tape: Tape, inputs: Mapping[str, Tensor], outputs: Tensors) -> None:
    """Bring weights into the layout that the kernels like, at capture."""
    tapes.copy_arguments(tape, tapes.constants(tape, inputs.values()))


@_captured
def output_reused(tape: Tape, inputs: Mapping[str, Tensor], outputs: Tensors) -> None:
    """Plan memory by when tensors were last read in the graph, outputs included."""
    tapes.reuse_memory(tape, outputs)


writes_twice = spoiling(tapes.repeat_writes)
thread_mixed = spoiling(tapes.share_workspace)


@instead
class replay_noise(RecordingBackend):
    """Sum in an order that depends on which core is done first."""

    num_replays = 0

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        outputs = super().replay(key, step)
        self.num_replays += 1
        with torch.inference_mode():
            for output in outputs:
                if self.num_replays % 2 == 0 and output.is_floating_point():
                    output.mul_(1 + torch.finfo(output.dtype).eps)
        return outputs


@instead
class output_moves(RecordingBackend):
    """Copy outputs out of the pool, to be on the safe side."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        return tuple(output.clone() for output in super().replay(key, step))


@instead
class wrong_bucket(RecordingBackend):
    """Look graphs up by what comes out of them."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        return super().replay(self._mistaken(key), step)

    def _mistaken(self, key: GraphKey) -> GraphKey:
        if key not in self._graphs or key.part != WHOLE:
            return key
        shapes = [output.shape for output in self._graphs[key].outputs]
        others = [other for other in self._graphs if other.part == WHOLE and other != key]
        equal = [other for other in others if [o.shape for o in self._graphs[other].outputs] == shapes]
        near = [other for other in others if other.phase == key.phase]
        return (equal or near or [key])[0]


@instead
class memory_kept(RecordingBackend):
    """Hold on to graphs in case they are captured again."""

    def cleanup(self) -> None:
        _KEPT.extend(graph.tape for graph in self._graphs.values())
        super().cleanup()


class EagerBackend(RecordingBackend):
    """Calls Python again, and copies what it gives to where the graph's outputs were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[GraphKey, BoundCallable] = {}

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, Tensor], after_warmup: Callback
    ) -> Tensors:
        self.calls[key] = fn
        return super().capture_one(key, fn, inputs, after_warmup)

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        if key not in self.calls or key not in self._graphs:
            return super().replay(key, step)
        with torch.inference_mode():
            self._expire(self._graphs[key].program)
            for output, result in zip(self._graphs[key].outputs, self.calls[key](), strict=True):
                output.copy_(result)
        return self._graphs[key].outputs

    def cleanup(self) -> None:
        super().cleanup()
        self.calls.clear()


eager_replay = instead(EagerBackend)


@instead
class capture_writes(RecordingBackend):
    """Run what is recorded, and leave it at that."""

    class recording(HostRecording):
        def finish(self) -> Tape:
            self.tape.saved.clear()
            return super().finish()


@instead
class recapture_ignored(RecordingBackend):
    """Keep a cache of graphs by key that nothing invalidates."""

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, Tensor], after_warmup: Callback
    ) -> Tensors:
        if key not in self._graphs:
            return super().capture_one(key, fn, inputs, after_warmup)
        self._check_capture(key)
        after_warmup()
        return self._graphs[key].outputs


@instead
class failed_capture_sticks(RecordingBackend):
    """Leave the stream in capture mode where the captured code raises."""

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        begun = False
        try:
            with super().segment(key):
                begun = True
                yield
        except BaseException:
            if begun:
                recorder._ACTIVE.recording = self._stuck = HostRecording.__new__(HostRecording)
            raise

    def cleanup(self) -> None:
        super().cleanup()
        if recorder._ACTIVE.recording is not None and recorder._ACTIVE.recording is getattr(self, "_stuck", None):
            recorder._ACTIVE.recording = None


@instead
class update_ignored(RecordingBackend):
    """Check the new values, and launch with those that were captured."""

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        captured = {
            name: argument.captured for graph in self._found(key, "update") for name, argument in graph.host.items()
        }
        super().update(key, {name: captured.get(name, value) for name, value in step.items()})


@instead
class update_late(RecordingBackend):
    """Renew arguments after the launch that they were meant for."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[GraphKey, Mapping[str, Any]] = {}

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        super().update(key, step)  # which refuses what does not fit
        late, self.waiting[key] = self.waiting.get(key, step), dict(step)
        super().update(key, late)


@instead
class uncaptured_replayed(RecordingBackend):
    """Round a key to the nearest one that there is."""

    def can_run(self, key: GraphKey) -> bool:
        return self._nearest(key) is not None

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        return super().replay(self._nearest(key) or key, step)

    def _nearest(self, key: GraphKey) -> GraphKey | None:
        known = [other for other in self._graphs if (other.phase, other.part) == (key.phase, key.part)]
        if key in known:
            return key

        def distance(other: GraphKey) -> int:
            return sum(abs(a - b) for a, b in zip(other.dims, key.dims, strict=False))

        return min(known, key=distance, default=None)


@instead
class rng_advances(RecordingBackend):
    """Seed the graph's own generator from the host's."""

    class recording(HostRecording):
        def finish(self) -> Tape:
            tape = super().finish()
            torch.randint(2**31, ())
            return tape


@instead
class late_landing(RecordingBackend):
    """Return from a replay before its last result is where it belongs."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        land()
        graph = self._graphs.get(key)
        target = None if graph is None else tapes.last_landing(graph.tape)
        before = None if target is None else target.clone()
        outputs = super().replay(key, step)
        if target is not None and before is not None:
            with torch.inference_mode():
                _LATE.append((target, target.clone()))
                target.copy_(before)
        return outputs


def land() -> None:
    """Let every result land that is still on its way."""
    with torch.inference_mode():
        while _LATE:
            target, content = _LATE.pop(0)
            target.copy_(content)
