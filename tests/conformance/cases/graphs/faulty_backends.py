"""Graph backends that are wrong in one way each, made of the recording and the calling one: for the suite to reject."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from core_acme.memory import CARD
from core_acme.runner import RecordingBackend
from torch import Tensor

from core.common.graphs import recorder
from core.common.graphs.backend import WHOLE, Callback, CallBackend, GraphKey
from core.common.graphs.tape import Tape, identify

Tensors = tuple[Tensor, ...]


class Stale(RecordingBackend):
    """Copies what is called `names` at capture, and reads the copies."""

    names: ClassVar[tuple[str, ...]] = ("x",)

    def capture_one(self, key: GraphKey, fn: Any, inputs: Mapping[str, Tensor], after_warmup: Callback) -> Tensors:
        outputs = super().capture_one(key, fn, inputs, after_warmup)
        for call in self._graphs[key].tape.calls:
            for name in self.names:
                for place, value in enumerate(call.args):
                    if name in inputs and isinstance(value, Tensor) and identify(value) == identify(inputs[name]):
                        call.args[place] = value.clone()
        return outputs


class StaleWeights(RecordingBackend):
    """Copies at capture whatever is no input and was there before."""

    def capture_one(self, key: GraphKey, fn: Any, inputs: Mapping[str, Tensor], after_warmup: Callback) -> Tensors:
        outputs = super().capture_one(key, fn, inputs, after_warmup)
        tape = self._graphs[key].tape
        known = {*map(identify, inputs.values()), *tape.fresh}
        for call in tape.calls:
            for place, value in enumerate(call.args):
                if isinstance(value, Tensor) and identify(value) not in known:
                    call.args[place] = value.clone()
        return outputs


class WritesTwice(RecordingBackend):
    """Runs each graph twice."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        super().replay(key, step)
        return super().replay(key, step)


class KeepsTapes(RecordingBackend):
    """Keeps what cleanup should drop."""

    kept: ClassVar[list[Any]] = []

    def cleanup(self) -> None:
        self.kept += self._graphs.values()
        super().cleanup()


class KeepsFailures(RecordingBackend):
    """Keeps the memory of captures that failed."""

    kept: ClassVar[list[Tape]] = []

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        try:
            with super().segment(key):
                yield
        except BaseException:
            self.kept.append(Tape(num_bytes=36 * 2**20))
            CARD.add(self.kept[-1])
            raise


class EagerReplay(RecordingBackend):
    """Runs the callable again, and copies what it gives."""

    def capture_one(self, key: GraphKey, fn: Any, inputs: Mapping[str, Tensor], after_warmup: Callback) -> Tensors:
        self.functions = getattr(self, "functions", {}) | {key: fn}
        return super().capture_one(key, fn, inputs, after_warmup)

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        if key not in getattr(self, "functions", {}):
            return super().replay(key, step)
        for output, result in zip(self._graphs[key].outputs, self.functions[key](), strict=True):
            output.copy_(result)
        return self._graphs[key].outputs


class ReplaysUnknown(RecordingBackend):
    """Takes any graph for a key that it does not know."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        return super().replay(key if key in self._graphs else next(iter(self._graphs), key), step)


class ClaimsUnknown(RecordingBackend):
    """Says that it can run anything."""

    def can_run(self, key: GraphKey) -> bool:
        return True


class WrongKey(RecordingBackend):
    """Replays the first graph whose outputs look the same."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        def form(graph: Any) -> list[tuple[Any, ...]]:
            return [(tuple(output.shape), output.dtype) for output in graph.outputs]

        if key.part == WHOLE and key in self._graphs:
            key = next(k for k, graph in self._graphs.items() if form(graph) == form(self._graphs[key]))
        return super().replay(key, step)


class _Changed(RecordingBackend):
    """Replays rightly, and then changes what it returns."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        return self.change(super().replay(key, step))

    def change(self, outputs: Tensors) -> Tensors:
        return outputs


class SharedOutputs(_Changed):
    """Lets outputs of one form lie in one memory."""

    def change(self, outputs: Tensors) -> Tensors:
        forms: dict[Any, Tensor] = {}
        return tuple(forms.setdefault((t.shape, t.dtype, t.stride()), t) for t in outputs)


class Overlapping(_Changed):
    """Gives outputs that are right, and the last two in one memory where these are equal in form."""

    def change(self, outputs: Tensors) -> Tensors:
        if len(outputs) > 3 and outputs[1].shape == outputs[0].shape:
            both = torch.stack((outputs[0], outputs[1]), -1)
            return both[..., 0], both[..., 1], *outputs[2:]
        return outputs


class Moving(_Changed):
    """Returns outputs at other addresses each time."""

    def change(self, outputs: Tensors) -> Tensors:
        self.held = [*getattr(self, "held", []), tuple(output.clone() for output in outputs)]
        return self.held[-1]


class Noise(_Changed):
    """Moves single results by one rounding, at random."""

    def change(self, outputs: Tensors) -> Tensors:
        for output in outputs:
            if output.is_floating_point() and output.numel():
                flat = output.view(-1) if output.is_contiguous() else output
                flat[..., :1] *= 1 + torch.finfo(output.dtype).eps * (time.perf_counter_ns() % 3)
        return outputs


class LateLanding(_Changed):
    """Lets the last result land with the next replay."""

    def change(self, outputs: Tensors) -> Tensors:
        if outputs:
            late, self.late = getattr(self, "late", torch.zeros_like(outputs[0])), outputs[0].clone()
            if late.shape == outputs[0].shape:
                outputs[0].copy_(late)
        return outputs


class LateParts(RecordingBackend):
    """Runs a part with the next one."""

    pending: GraphKey | None = None

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        if self._in_session or key.part == WHOLE:
            return super().replay(key, step)
        pending, self.pending = self.pending, key
        return super().replay(pending or key, step)


class FailureSticks(RecordingBackend):
    """Stays in the recording that failed."""

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        if getattr(self, "failed", False):
            raise RuntimeError("the stream is still capturing")
        try:
            with super().segment(key):
                yield
        except BaseException:
            self.failed = True
            raise

    def cleanup(self) -> None:
        self.failed = False
        super().cleanup()


class LosesOthers(FailureSticks):
    """Loses the graphs captured before with the capture that failed."""

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        try:
            with RecordingBackend.segment(self, key):
                yield
        except BaseException:
            self._graphs.clear()
            raise


class CaptureWrites(RecordingBackend):
    """Leaves in state what the recording wrote."""

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        undo = Tape.undo_writes
        Tape.undo_writes = lambda tape: tape.saved.clear()  # type: ignore[method-assign]
        try:
            with super().segment(key):
                yield
        finally:
            Tape.undo_writes = undo  # type: ignore[method-assign]


class WarmsUpOften(RecordingBackend):
    """Runs the callable once more when its effects were undone."""

    def capture_one(self, key: GraphKey, fn: Any, inputs: Mapping[str, Tensor], after_warmup: Callback) -> Tensors:
        return super().capture_one(key, fn, inputs, lambda: (after_warmup(), fn(), None)[2])


class DrawsNumbers(RecordingBackend):
    """Moves the random generator on at each recording."""

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        with super().segment(key):
            yield
        torch.rand(1)


class FreezesNumbers(RecordingBackend):
    """Draws the same numbers at each replay."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return super().replay(key, step)


class FreezesReads(RecordingBackend):
    """Records host reads as the numbers that they gave."""

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        refuse = recorder._refuse_unrecordable
        recorder._refuse_unrecordable = lambda *args: None
        try:
            with super().segment(key):
                yield
        finally:
            recorder._refuse_unrecordable = refuse


class KeepsFirst(RecordingBackend):
    """Keeps the first graph of a key that is captured again."""

    def _keep(self, key: GraphKey, tape: Tape) -> None:
        before = self._graphs.get(key)
        super()._keep(key, tape)
        if before is not None:
            self._graphs[key].tape = before.tape


class IgnoresCaptures(RecordingBackend):
    """Takes a key that it has for captured already."""

    def capture_one(self, key: GraphKey, fn: Any, inputs: Mapping[str, Tensor], after_warmup: Callback) -> Tensors:
        if key not in self._graphs:
            return super().capture_one(key, fn, inputs, after_warmup)
        after_warmup()
        return self._graphs[key].outputs


class OneForAll(RecordingBackend):
    """Keeps the graphs of all programs in one table."""

    table: ClassVar[dict[GraphKey, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._graphs = self.table


class MixesThreads(RecordingBackend):
    """Hands the graph to be replayed through one place for all threads."""

    current: ClassVar[list[Any]] = [None]

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        own = self._graphs.get(key)
        if own is None:
            return super().replay(key, step)
        self.current[0] = own
        if threading.active_count() > 1:
            time.sleep(1e-4)
        graph = self.current[0]
        with torch.inference_mode():
            graph.tape.replay()
        return own.outputs


class IgnoresUpdates(RecordingBackend):
    """Replays with the host-side arguments of the capture."""

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        for graph in self._found(key, "update"):
            graph.ready = True


class Compiles(_Changed):
    """Has torch compile something at each replay."""

    def change(self, outputs: Tensors) -> Tensors:
        def grown(x: Tensor) -> Tensor:
            return x + 1

        torch.compile(grown, backend="eager", dynamic=False)(torch.ones(3))
        torch._dynamo.reset_code(grown.__code__)
        return outputs


class CallsTwice(CallBackend):
    """Runs the program of a key twice."""

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        super().replay(key, step)
        return super().replay(key, step)


class CallsAny(CallBackend):
    """Runs the latest program, whatever the key."""

    def can_run(self, key: GraphKey) -> bool:
        return bool(self._programs)

    def replay(self, key: GraphKey, step: object = None) -> Tensors:
        return list(self._programs.values())[-1]()


class CallsOnce(CallBackend):
    """Returns what the first run gave."""

    def capture_one(self, key: GraphKey, fn: Any, inputs: Mapping[str, Tensor], after_warmup: Callback) -> Tensors:
        outputs = super().capture_one(key, fn, inputs, after_warmup)
        self._programs[key] = lambda: outputs
        return outputs
