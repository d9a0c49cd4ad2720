"""`GraphBackend` by recording: for any device that torch runs on, whether or not its runtime has graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from core.common.graphs.backend import WHOLE, BoundCallable, Callback, GraphKey
from core.common.graphs.recorder import Recording, refuse_while_recording
from core.common.graphs.tape import Tape
from core.errors import CaptureError


class RecordedBackend:
    """Captures callables, and stretches of running code, as tapes of torch calls; one tape per key.

    A replay calls torch once per recorded call, so it saves the model's Python code and no launch. Every tape keeps
    memory of its own: what a replay returned is valid until the next one of the same key.

    - device: where the graphs run; a capture gives its random state back.
    - hold: called with each finished tape and its bytes, for a device whose allocator counts nothing.
    """

    def __init__(self, device: torch.device, hold: Callable[[Tape, int], None] | None = None) -> None:
        self._device, self._hold = device, hold
        self._tapes: dict[GraphKey, tuple[Tape, tuple[Tensor, ...]]] = {}
        self._recording: Recording | None = None
        self._in_session = False

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        """Allow captures until the block ends; a segment that was not left by then is abandoned and refused."""
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

    @contextmanager
    def segment(self, key: GraphKey) -> Iterator[None]:
        """Record what runs inside the block under `key`; it may be entered and left in the middle of running code.

        An exception that leaves the block abandons the recording: its writes are undone, and `key` stays as it was.
        """
        self._check_capture(key)
        recording = self._recording = Recording(self._device)
        try:
            yield
            tape = recording.finish()
        except BaseException as error:
            recording.abandon()
            if isinstance(error, CaptureError):
                error.add_note(f"while capturing {key}")
            raise
        finally:
            self._recording = None
        if self._hold is not None:
            self._hold(tape, tape.num_bytes)
        self._drop_stale(key)
        self._tapes[key] = tape, ()

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, Tensor], after_warmup: Callback
    ) -> tuple[Tensor, ...]:
        """Warm `fn` up, call `after_warmup`, record `fn` under `key` and return its static outputs."""
        self._check_capture(key)  # before the warm-up writes anything
        with torch.no_grad():
            fn()
            after_warmup()
            with self.segment(key):
                outputs = fn()
        self._tapes[key] = self._tapes[key][0], outputs
        return outputs

    def can_run(self, key: GraphKey) -> bool:
        """Return whether `key` was captured."""
        return key in self._tapes

    def replay(self, key: GraphKey, step: object = None) -> tuple[Tensor, ...]:
        """Run the tape of `key` on the present content of its inputs; return its static outputs, () for a segment."""
        if key not in self._tapes:
            known = ", ".join(map(str, self._tapes)) or "none"
            raise CaptureError(f"replay of {key}", found=f"captured keys: {known}", remedy="capture it first")
        refuse_while_recording(f"replay of {key}")
        tape, outputs = self._tapes[key]
        # Inference mode, not no_grad: static buffers made under inference_mode may be written in no other.
        with torch.inference_mode():
            tape.replay()
        return outputs

    def replay_session(self) -> AbstractContextManager[None]:
        """Need nothing around replays."""
        return nullcontext()

    def cleanup(self) -> None:
        """Drop all tapes, and with them the memory that only they held."""
        self._abandon()
        self._tapes.clear()

    def _check_capture(self, key: GraphKey) -> None:
        refuse_while_recording(f"capture of {key}")
        if not self._in_session:
            raise CaptureError(f"capture of {key}", found="no session is open", remedy="enter capture_session() first")

    def _drop_stale(self, key: GraphKey) -> None:
        """Drop what an earlier capture of the key recorded from this part on: it reads memory that is gone."""
        whole = key._replace(part=WHOLE)
        for old in [each for each in self._tapes if each._replace(part=WHOLE) == whole]:
            if old.part == WHOLE or old.part >= key.part:
                del self._tapes[old]

    def _abandon(self) -> None:
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
