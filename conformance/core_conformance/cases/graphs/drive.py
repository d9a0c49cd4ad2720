"""Drives a device's `GraphBackend` directly: captures a subject whole or in two parts, replays it, and judges the
result.

The result of a replay is compared with the uncaptured subject, run in Python on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.common.graphs.backend import GraphBackend, GraphKey, SegmentBackend
from core.common.graphs.weak import overlaps
from core.device import Device, Mode
from core_conformance.cases.graphs.promises import PARTS
from core_conformance.dtypes import working_dtype
from core_conformance.rules import oracle
from core_conformance.trial import Trial

KEY = GraphKey("decode", (8,))
TOKENS, WIDTH = 8, 32
"""Rows and columns of most inputs."""
Tensors = tuple[Tensor, ...]
Values = Mapping[str, Tensor]


def like(device: Device) -> Tensor:
    """Return an empty tensor of the device in its working dtype."""
    return torch.empty(0, dtype=working_dtype(device), device=device.torch_device)


def normal(shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    """Return normal numbers, the same on every device, in the dtype and on the device of a tensor."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


def whole(shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    """Return whole numbers between -8 and 8, which every dtype holds and adds exactly."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(like)


def copies(*tensors: Tensor) -> Tensors:
    """Return a copy of each tensor, in memory of its own."""
    return tuple(tensor.clone() for tensor in tensors)


def _copies_of(tensors: Values, *middle: Tensor) -> Tensors:
    return copies(*middle)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A callable to capture, with its tensors."""

    #: All tensors that it reads or writes, at constant addresses.
    tensors: dict[str, Tensor]
    #: Names of the tensors that hold a call's inputs; the others are weights and state.
    inputs: tuple[str, ...] = ("x",)
    #: The part of the first graph.
    first: Callable[[Values], Tensors]
    #: The call between the two parts: eager if graphs are captured in parts, else inside the single graph.
    between: Callable[..., Tensors] = copies
    #: The part of the second graph.
    second: Callable[..., Tensors] = _copies_of

    def run(self, tensors: Values | None = None) -> Tensors:
        """Run the subject uncaptured, on these tensors or its own."""
        tensors = self.tensors if tensors is None else tensors
        with torch.no_grad():
            return self.second(tensors, *self.between(*self.first(tensors)))

    def twin(self) -> Subject:
        """Return the same subject on copies of the tensors with their present content."""
        own = oracle.own(self.tensors)
        return replace(self, tensors=own)

    def write(self, **values: Tensor) -> None:
        """Write into tensors in place; values may come from the host."""
        for name, value in values.items():
            self.tensors[name].copy_(value)


class Watcher:
    """Is called when warm-ups are over and a recording begins, and when it has ended and nothing was replayed; does
    nothing itself."""

    def before(self) -> None:
        """Is called before a recording begins."""

    def after(self) -> None:
        """Is called after a recording has ended."""


@dataclass
class Captured:
    """A subject captured under a key."""

    backend: GraphBackend
    key: GraphKey
    subject: Subject
    #: The outputs of the capture and the values between the parts, kept alive.
    outputs: Tensors
    middle: Tensors = ()
    targets: Tensors = ()
    in_parts: bool = False
    empty: list[bool] = field(default_factory=list)

    def replay(self) -> Tensors:
        """Replay it on the present content of its tensors, and return its outputs."""
        if not self.in_parts:
            return self.backend.replay(self.key)
        self.empty.append(self.backend.replay(part(self.key, 0)) == ())
        self.land()
        self.backend.replay(part(self.key, 1))
        return self.outputs

    def land(self) -> None:
        """Run the eager part, and copy its result to where the second graph reads it."""
        with torch.no_grad():
            for target, result in zip(self.targets, self.subject.between(*self.middle), strict=True):
                target.copy_(result)

    def let_go(self) -> None:
        """Drop every reference to memory of the graphs."""
        self.outputs = self.middle = self.targets = ()


def part(key: GraphKey, number: int) -> GraphKey:
    """Return the key of one part of a key that is captured in parts."""
    return key._replace(part=number)


@contextmanager
def session(backend: GraphBackend) -> Iterator[None]:
    """Enter around captures, as the runner of a program does."""
    with torch.no_grad(), backend.capture_session():
        yield


def record(
    mode: Mode, backend: GraphBackend, subject: Subject, key: GraphKey = KEY, watcher: Watcher | None = None
) -> Captured:
    """Capture a subject under a key, inside `session`. Raises what the backend raises."""
    watcher = watcher or Watcher()
    if mode in PARTS:
        return _record_parts(cast(SegmentBackend, backend), subject, key, watcher)
    inputs = {name: subject.tensors[name] for name in subject.inputs}
    outputs = backend.capture_one(key, subject.run, inputs, watcher.before)
    watcher.after()
    return Captured(backend, key, subject, outputs)


def _record_parts(backend: SegmentBackend, subject: Subject, key: GraphKey, watcher: Watcher) -> Captured:
    shapes = [torch.empty_like(tensor) for tensor in subject.between(*subject.first(subject.tensors))]
    subject.run()
    watcher.before()
    with backend.segment(part(key, 0)):
        middle = subject.first(subject.tensors)
        targets = tuple(torch.empty_like(shape) for shape in shapes)
    watcher.after()
    captured = Captured(backend, key, subject, (), middle, targets, in_parts=True)
    backend.replay(part(key, 0))
    captured.land()
    watcher.before()
    with backend.segment(part(key, 1)):
        captured.outputs = subject.second(subject.tensors, *targets)
    watcher.after()
    backend.replay(part(key, 1))
    return captured


def capture(
    device: Device, mode: Mode, subject: Subject, key: GraphKey = KEY, watcher: Watcher | None = None
) -> Captured:
    """Capture a subject with a backend of its own."""
    backend = device.graph_backend()
    with session(backend):
        captured = record(mode, backend, subject, key, watcher)
        device.synchronize()  # inside the session, since another thread may be capturing outside of it
    return captured


def can_run(captured: Captured) -> bool:
    """Return whether the backend says that it can replay the whole of what was captured."""
    keys = [part(captured.key, number) for number in range(2)] if captured.in_parts else [captured.key]
    return all(captured.backend.can_run(key) for key in keys)


class _Names(TorchDispatchMode):
    """Notes the names of the ops that run, in every spelling a plugin may have declared: ns::op, op, ns.op.overload."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.names |= {name, name.partition("::")[2], str(func), str(func).rpartition(".")[0]}
        return func(*args, **(kwargs or {}))


class Wanted:
    """The expected result of a subject on the present content of its tensors, found by a run on copies.

    is_exact: whether every bit must be equal; false if the plugin declares that an op may differ. tensors: their
    expected content after the run.
    """

    def __init__(self, trial: Trial, subject: Subject) -> None:
        twin, device, profile = subject.twin(), trial.device, trial.profile
        self._trial, self._exact = trial, None
        if profile.nondeterministic_ops or not device.capabilities.deterministic:
            with _Names() as seen:
                subject.twin().run()
            if not device.capabilities.deterministic or seen.names & profile.nondeterministic_ops:
                self._exact, _ = oracle.exact(lambda **tensors: twin.run(tensors), twin.tensors)
        self.is_exact = self._exact is None
        self.outputs = twin.run()
        self.tensors = twin.tensors

    def check(self, name: str, outputs: Sequence[Tensor]) -> None:
        """Judge outputs: in every bit, or by T1 where the plugin declares that ops of the subject differ in bits."""
        if not self._trial.require(len(outputs) == len(self.outputs), f"{name}: {len(outputs)} outputs"):
            return
        for index, (output, wanted) in enumerate(zip(outputs, self.outputs, strict=True)):
            label = f"{name}, output {index}"
            if self._exact is None:
                self._trial.same(label, output, wanted)
            else:
                self._trial.judge(label, output, wanted, self._exact[index])

    def check_form(self, name: str, outputs: Sequence[Tensor]) -> None:
        """Require shapes, dtypes and strides, and that memory is shared where the uncaptured callable shares it."""
        for index, (output, wanted) in enumerate(zip(outputs, self.outputs, strict=True)):
            self._trial.same_metadata(f"{name}, output {index}", output, wanted)
        self._trial.require(
            _shared(outputs) == _shared(self.outputs),
            f"{name}: outputs that share memory: {_shared(outputs)}; uncaptured: {_shared(self.outputs)}",
        )


def check_replay(trial: Trial, captured: Captured, seed: int, name: str) -> None:
    """Replay on other whole numbers as x, and judge the outputs."""
    x = captured.subject.tensors["x"]
    captured.subject.write(x=whole(tuple(x.shape), seed, x))
    Wanted(trial, captured.subject).check(name, captured.replay())


def check_same(trial: Trial, name: str, outputs: Tensors, wanted: Tensors) -> None:
    """Require the bits of other outputs."""
    for index, (output, each) in enumerate(zip(outputs, wanted, strict=True)):
        trial.same(f"{name}, output {index}", output, each)


def _shared(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return sorted((min(a, b), max(a, b)) for a, b, _ in overlaps(tensors))


def check_apart(trial: Trial, outputs: Sequence[Tensor], tensors: Values) -> None:
    """Require that no output lies in memory of a tensor that the graph reads or writes."""
    names, count = list(tensors), len(outputs)
    for one, other in _shared([*outputs, *tensors.values()]):
        where = names[other - count] if other >= count > one else ""
        trial.require(not where, f"output {one} lies in the memory of {where!r}, which every call writes")
