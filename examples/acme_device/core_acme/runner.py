"""Acme's `GraphBackend`: one tape per key, recorded at capture and run again at replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from core.common.graphs.backend import WHOLE, BoundCallable, Callback, GraphKey
from core.common.graphs.recorder import refuse_while_recording
from core.common.graphs.tape import Tape, identify, poison
from core.errors import CaptureError

from core_acme import host_arguments
from core_acme.host_arguments import HostArgument, HostRecording
from core_acme.memory import CARD


@dataclass(slots=True, eq=False)
class _Program:
    """What all parts of one key share."""

    parts: list[GraphKey] = field(default_factory=list)
    #: What each part gave away, valid until another key is replayed.
    given: dict[GraphKey, tuple[torch.Tensor, ...]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Graph:
    """One tape."""

    tape: Tape
    program: _Program
    outputs: tuple[torch.Tensor, ...] = ()
    #: Its host-side arguments, by name.
    host: dict[str, HostArgument] = field(default_factory=dict)
    #: Whether its host-side arguments have values for the next replay.
    ready: bool = True
    #: Whether these values are still those of the recording.
    recorded: bool = True


class RecordingBackend:
    """Captures callables and stretches of running code as tapes; one tape per key.

    Results are valid until another key is replayed (the parts of one key count as one): then their memory is poisoned,
    where a device would have let the other graph use it.
    """

    recording: ClassVar[type[HostRecording]] = HostRecording
    """What captures with; a subclass may record in another way."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, _Graph] = {}
        self._programs: dict[GraphKey, _Program] = {}
        self._replayed: _Program | None = None
        self._in_session = False
        self._recording: HostRecording | None = None

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        """Allow captures; a device would set up its memory pool and its stream here."""
        if self._in_session:
            raise CaptureError("a capture session", found="one is open already", remedy="close it first")
        self._in_session = True
        try:
            yield
            if self._recording is not None:
                raise CaptureError(
                    "the end of a capture session",
                    found="a segment is still being recorded, and was abandoned",
                    remedy="leave every segment before the session",
                )
        finally:
            self._abandon()
            self._in_session = False
            for graph in self._graphs.values():
                graph.ready = graph.ready and not (graph.recorded and graph.host)
                graph.recorded = False

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        """Record what runs inside the block under `key`; it may be entered and left in the middle of running code.

        An exception that leaves the block abandons the recording: its writes are undone and `key` stays as it was.
        Gradients are the caller's to turn off. Host-side arguments keep the values of the recording for one replay
        within the capture session, the one that completes the recorded run.
        """
        self._check_capture(key)
        recording = self._recording = self.recording()
        try:
            yield
            tape = recording.finish()
            self._check_parts(key, recording.host)
        except BaseException as error:
            recording.abandon()
            if isinstance(error, CaptureError):
                error.add_note(f"while capturing {key}")
            raise
        finally:
            if self._recording is recording:
                self._recording = None
        CARD.add(tape)
        self._keep(key, tape)
        self._graphs[key].host = recording.host

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, torch.Tensor], after_warmup: Callback
    ) -> tuple[torch.Tensor, ...]:
        """Warm `fn` up, call `after_warmup`, record `fn` under `key` and return its poisoned static outputs."""
        self._check_capture(key)  # before the warm-up writes anything
        with torch.no_grad():
            fn()
            after_warmup()
            with self.segment(key):
                outputs = fn()
        graph = self._graphs[key]
        graph.outputs = outputs
        own = {identify(output): output for output in outputs}
        graph.program.given[key] = tuple(own[address] for address in own.keys() & graph.tape.fresh.keys())
        return outputs

    def can_run(self, key: GraphKey) -> bool:
        """Return whether `key` was captured."""
        return key in self._graphs

    def host_arguments(self, key: GraphKey) -> frozenset[str]:
        """Return the names of the host-side arguments in the calls recorded under `key`; a whole key has its parts'."""
        return frozenset(name for graph in self._found(key, "host-side arguments") for name in graph.host)

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        """Give the host-side arguments of `key` their values for the next replay; all are set, or none.

        A whole key that was captured in parts passes them to its parts. Raises `UsageError` for other names than were
        captured, and for values of another type or length.
        """
        graphs = self._found(key, "update")
        host_arguments.check(key, {name: it for graph in graphs for name, it in graph.host.items()}, step)
        for graph in graphs:
            for name, argument in graph.host.items():
                argument.set(step[name])
            graph.ready, graph.recorded = True, False

    def replay(self, key: GraphKey, step: object = None) -> tuple[torch.Tensor, ...]:
        """Run the tape of `key` on the present content of its inputs and return its static outputs, () for a segment.

        Refused while this thread records, and where the key's host-side arguments were not renewed since its last
        replay. step is not read: `update` has put it on the tape.
        """
        graph = self._graphs.get(key)
        if graph is None:
            raise self._not_captured(key, "replay")
        refuse_while_recording("a replay")
        if not graph.ready:
            raise CaptureError(
                f"replay of {key}",
                found=f"{', '.join(sorted(graph.host))}: not renewed since the last replay",
                remedy="call update() before each replay",
            )
        # Inference mode, not no_grad: static buffers made under inference_mode may be written in no other.
        with torch.inference_mode():
            if graph.program is not self._replayed:
                self._expire(graph.program)
            graph.ready = not graph.host
            graph.tape.replay()
        return graph.outputs

    def replay_session(self) -> AbstractContextManager[None]:
        """Need nothing around replays."""
        return nullcontext()

    def cleanup(self) -> None:
        """Drop all tapes, and with them all memory that only they held."""
        self._abandon()
        self._graphs.clear()
        self._programs.clear()
        self._replayed = None

    def _check_capture(self, key: GraphKey) -> None:
        refuse_while_recording(f"capture of {key}")
        if not self._in_session:
            raise CaptureError(
                f"capture of {key}", found="no capture session is open", remedy="capture inside capture_session()"
            )

    def _check_parts(self, key: GraphKey, host: Mapping[str, HostArgument]) -> None:
        """Refuse a part whose host-side arguments differ from an earlier part's: one update of the key reaches both."""
        program = self._programs.get(key._replace(part=WHOLE), _Program())
        for part in (part for part in program.parts if part.part < key.part):
            for name, argument in self._graphs[part].host.items():
                if name in host:
                    host_arguments.refuse_other_value(key, name, argument.captured, host[name].captured)

    def _keep(self, key: GraphKey, tape: Tape) -> None:
        """Store the graph of a key; what an earlier capture stored from this part on reads memory that is gone."""
        program = self._programs.setdefault(key._replace(part=WHOLE), _Program())
        for stale in [part for part in program.parts if part.part >= key.part or part.part == WHOLE]:
            program.parts.remove(stale)
            del self._graphs[stale], program.given[stale]
        program.parts.append(key)
        # Running code may have kept anything that was made inside the block.
        program.given[key] = tuple(tape.fresh.values())
        self._graphs[key] = _Graph(tape, program)

    def _found(self, key: GraphKey, what: str) -> list[_Graph]:
        """Return the graph of a key, or those of its parts."""
        parts = [key] if key in self._graphs else []
        if key.part == WHOLE and key in self._programs:
            parts = self._programs[key].parts
        if not parts:
            raise self._not_captured(key, what)
        return [self._graphs[part] for part in parts]

    def _not_captured(self, key: GraphKey, what: str) -> CaptureError:
        known = ", ".join(map(str, self._graphs)) or "none"
        return CaptureError(f"{what} of {key}", found=f"captured keys: {known}", remedy="capture it first")

    def _expire(self, program: _Program) -> None:
        """Poison what the program replayed before this one gave away."""
        if self._replayed is not None:
            for given in self._replayed.given.values():
                poison(given)
        self._replayed = program

    def _abandon(self) -> None:
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
