"""`GraphBackend`: how a device captures a callable once and replays it at every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


KeyGuards = tuple[tuple[str, Hashable], ...]
"""Further conditions of a graph, sorted by name: `(("lora", False), ("sampling", "greedy"))`."""

WHOLE = -1


class GraphKey(NamedTuple):
    """What a captured graph was captured for; a key that was not captured is refused, never replayed approximately."""

    #: forward mode: "decode", "prefill", "verify", …
    phase: str
    #: bucket dimensions in declared order, e.g. `(8, 8)`
    dims: tuple[int, ...]
    #: what else was constant at capture: LoRA, which hidden states are returned, …
    guards: KeyGuards = ()
    #: the number of this part, where a key is captured in parts; else `WHOLE`
    part: int = WHOLE

    def __str__(self) -> str:
        guards = "".join(f", {name}={value}" for name, value in self.guards)
        part = "" if self.part == WHOLE else f" part {self.part}"
        return f"{self.phase}[{', '.join(map(str, self.dims))}{guards}]{part}"


Callback = Callable[[], None]
BoundCallable = Callable[[], "tuple[torch.Tensor, ...]"]
"""A lowered callable that takes no arguments: it reads its static input buffers and returns a flat tuple of tensors."""


class GraphBackend(Protocol):
    """Captures and replays callables; one instance belongs to one program and is used by one thread at a time.

    The program's runner owns input buffers and buckets; the backend owns graphs, their memory pool and their outputs.
    A backend that can end a recording in the middle of running code is a `SegmentBackend`; one whose captured ops take
    host-side arguments is an `UpdateBackend`.
    """

    def capture_session(self) -> AbstractContextManager[None]:
        """Enter once around all captures of a program: pool, stream and other state shared by them."""
        ...

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, torch.Tensor], after_warmup: Callback
    ) -> tuple[torch.Tensor, ...]:
        """Warm `fn` up, call `after_warmup`, capture `fn` under `key` and return its static outputs.

        inputs are the static buffers `fn` reads, by name: their addresses stay the same for the program's life. The
        outputs live at fixed addresses too and are valid until the next replay of any key: graphs of one pool may use
        each other's memory, so a backend must not hold outputs in a way that keeps the pool from reusing theirs.
        Warm-up really runs `fn`; `after_warmup` undoes the writes of the warm-up that matter to the runner. Called
        inside `capture_session`; a key captured again replaces its graph. A failed capture must leave the device usable
        and raise; the runner attaches key and remedy. Where the device holds no more graphs, that is
        `GraphResourcesError`: what was captured of this key is gone, and every other key stays valid.
        """
        ...

    def can_run(self, key: GraphKey) -> bool:
        """Return whether `key` was captured."""
        ...

    def replay(self, key: GraphKey, step: object = None) -> tuple[torch.Tensor, ...]:
        """Run the graph of `key` on the present content of its input buffers and return its static outputs.

        step: what `UpdateBackend.update` was given for this replay; None elsewhere.
        """
        ...

    def replay_session(self) -> AbstractContextManager[None]:
        """Enter around a run of replays (a serving loop); most backends need nothing here."""
        ...

    def cleanup(self) -> None:
        """Drop all graphs and return their memory; the backend can capture again afterwards."""
        ...


class SegmentBackend(GraphBackend, Protocol):
    """A backend that records what runs between two points; its device lists "piecewise" and "segmented" as modes."""

    def segment(self, key: GraphKey) -> AbstractContextManager[None]:
        """Record what runs inside the block under `key`, without warm-up; `replay(key)` runs it again and returns ().

        The runner enters and exits this context by hand in the middle of running code, inside `capture_session`. What
        the block allocates belongs to the graph and lives as long as the graph. An exception inside the block abandons
        the recording and leaves the device usable.
        """
        ...


class UpdateBackend(GraphBackend, Protocol):
    """A backend whose captured ops take host-side arguments, which must be renewed before each replay.

    Where the argument holds the values of a declared input, it is named after that input. Its value is then the flat
    list of the input's values at the bucket's size, padding included; the code that prepares inputs on the host gives
    that list itself.
    """

    def host_arguments(self, key: GraphKey) -> frozenset[str]:
        """Return the names of the host-side arguments that were captured under `key`."""
        ...

    def update(self, key: GraphKey, step: Mapping[str, Any]) -> None:
        """Give these arguments their values for the next replay of `key`; the runner has checked their names."""
        ...


GraphBackendFactory = Callable[[], GraphBackend]


class CallBackend:
    """Runs the callable at every replay: for devices without graphs, where a compiled program is the graph."""

    def __init__(self) -> None:
        self._programs: dict[GraphKey, BoundCallable] = {}

    def capture_session(self) -> AbstractContextManager[None]:
        """Need nothing around captures."""
        return nullcontext()

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, torch.Tensor], after_warmup: Callback
    ) -> tuple[torch.Tensor, ...]:
        """Run `fn` once, so that lazy compilation is done, and keep `fn`."""
        outputs = fn()
        after_warmup()
        self._programs[key] = fn
        return outputs

    def can_run(self, key: GraphKey) -> bool:
        """Return whether `key` was captured."""
        return key in self._programs

    def replay(self, key: GraphKey, step: object = None) -> tuple[torch.Tensor, ...]:
        """Call the program of `key`; its outputs are fresh tensors."""
        return self._programs[key]()

    def replay_session(self) -> AbstractContextManager[None]:
        """Need nothing around replays."""
        return nullcontext()

    def cleanup(self) -> None:
        """Drop all programs."""
        self._programs.clear()
