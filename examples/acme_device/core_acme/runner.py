"""Acme's `GraphBackend`: one tape per key, recorded at capture and run again at replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from core.common.graphs.backend import BoundCallable, Callback, GraphKey
from core.errors import CaptureError

from core_acme.recorder import Tape, record


class RecordingBackend:
    """Captures callables as tapes; one tape per key."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, tuple[Tape, tuple[torch.Tensor, ...]]] = {}
        self._in_session = False

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        """Allow captures; a device would set up its memory pool and its stream here."""
        if self._in_session:
            raise CaptureError("acme: a capture session", found="one is open already", remedy="close it first")
        self._in_session = True
        try:
            yield
        finally:
            self._in_session = False

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, torch.Tensor], after_warmup: Callback
    ) -> tuple[torch.Tensor, ...]:
        """Warm `fn` up, call `after_warmup`, record `fn` under `key` and return its poisoned static outputs."""
        if not self._in_session:
            raise CaptureError(
                f"acme: capture of {key}", found="no capture session is open", remedy="capture inside capture_session()"
            )
        with torch.no_grad():
            fn()
            after_warmup()
            try:
                tape, outputs = record(fn)
            except CaptureError as error:
                error.add_note(f"while capturing {key}")
                raise
        self._graphs[key] = (tape, outputs)
        return outputs

    def can_run(self, key: GraphKey) -> bool:
        """Return whether `key` was captured."""
        return key in self._graphs

    def replay(self, key: GraphKey, step: object = None) -> tuple[torch.Tensor, ...]:
        """Run the tape of `key` on the present content of its inputs and return its static outputs."""
        if key not in self._graphs:
            known = ", ".join(map(str, self._graphs)) or "none"
            raise CaptureError(f"acme: replay of {key}", found=f"captured keys: {known}", remedy="capture it first")
        tape, outputs = self._graphs[key]
        # Inference mode, not no_grad: static buffers made under inference_mode may be written in no other.
        with torch.inference_mode():
            tape.replay()
        return outputs

    def replay_session(self) -> AbstractContextManager[None]:
        """Need nothing around replays."""
        return nullcontext()

    def cleanup(self) -> None:
        """Drop all tapes, and with them all memory that only they held."""
        self._graphs.clear()
