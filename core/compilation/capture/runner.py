"""`GraphRunner`: what captures and replays graphs on any device; the device's part of it is its `GraphBackend`.

One session per program: largest key first (the caller's order), warm-up, one pool, the collector frozen; then replays,
each refused unless its key was captured. While serving nothing may be captured, and compiles are counted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from core.common.collector import frozen
from core.common.graphs.backend import (
    BoundCallable,
    CallBackend,
    GraphBackend,
    GraphKey,
    SegmentBackend,
    UpdateBackend,
)
from core.compilation.capture.background import Background
from core.compilation.capture.bucket_report import BucketReport
from core.compilation.capture.host_reads import is_host_read
from core.compilation.capture.segments import CapturedParts, capture_parts
from core.compilation.capture.watch import CompileWatch, Watched
from core.errors import CaptureError, CoreError, UsageError

if TYPE_CHECKING:
    from core.device import Device

__all__ = ["GraphRunner"]

log = logging.getLogger("core.compilation.program")
FIRST_PARTS_WARMUPS, LATER_PARTS_WARMUPS = 2, 1
"""Warm-up runs before a capture in parts; those of the first key also do one-time allocations and compiles."""


@dataclass(slots=True)
class _Entry:
    """One captured key."""

    #: Replays it, given the step's host-side arguments.
    run: Callable[[Any], tuple[Tensor, ...]]
    #: The static inputs, kept because the graph holds their addresses only.
    inputs: Mapping[str, Tensor]
    host_arguments: frozenset[str]
    #: Tensors whose addresses the graph holds, for the check of debug mode.
    watched: Sequence[Watched]
    #: The generated Python of a key captured in parts.
    source: str
    num_replays: int = 0


class GraphRunner:
    """Captures callables by key and replays them. Used by one thread at a time; runners share nothing.

    Outputs of a replay are static: valid until the next replay of any key of this runner.
    """

    def __init__(self, device: Device, backend: GraphBackend, *, debug: bool = False, strict: bool = False) -> None:
        """debug: check before each replay that no memory of a graph moved. strict: refuse compiles while serving."""
        #: Compiles buckets while they are replayed already.
        self.background = Background(device.lowerings.interim, device.parts.kernel_compilers)
        self._device = device
        self._backend = backend
        self._debug = debug
        self._updates = device.capabilities.update
        self._checks = debug or self._updates
        self._entries: dict[GraphKey, _Entry] = {}
        self._serving = 0
        self._strict = strict
        self.compiles = CompileWatch(strict=strict)
        self.fallbacks: Counter[str] = Counter()
        self.stand_ins: Counter[str] = Counter()
        self.oversized: Counter[str] = Counter()

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The captured keys, in order of capture."""
        return tuple(self._entries)

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        """Enter around captures; raises `CaptureError` while serving: a capture stalls everything on the device."""
        if self._serving:
            raise CaptureError(
                f"capturing on {self._device.name}",
                found="the program is serving: a capture now would stall its requests and use its buffers",
                remedy="capture before serving(), or leave it first",
            )
        # Calls capture nothing that a finaliser could end up in.
        undisturbed = nullcontext() if type(self._backend) is CallBackend else frozen()
        with torch.no_grad(), undisturbed, self._backend.capture_session():
            yield
        for entry in self._entries.values():
            entry.num_replays = 0  # compiles of the captures and their checks do not count
        # Free memory that warm-ups and eager calls cached for the capture stream: no replay uses it.
        self._device.parts.empty_cache()

    def capture(
        self,
        key: GraphKey,
        fn: BoundCallable,
        inputs: Mapping[str, Tensor],
        *,
        in_parts: bool = False,
        reset: Callable[[], None] | None = None,
        watched: Sequence[Watched] = (),
    ) -> tuple[tuple[Tensor, ...], BucketReport]:
        """Capture `fn` under `key`, whole or in parts, and return its static outputs and what it cost.

        inputs: the static tensors it reads, by name. reset: undoes what warm-up and capture wrote to state. Call inside
        `capture_session`. Raises `CaptureError`; the device stays usable, and keys captured before stay valid.
        """
        # A failed capture may have replaced some parts of an earlier one; the remaining parts are then useless.
        self._entries.pop(key, None)
        warm: list[int] = []

        def after_warmup() -> None:
            if reset is not None:
                reset()
            self._device.synchronize()
            warm.append(self._device.parts.memory().taken_bytes)

        start = time.perf_counter()
        try:
            if in_parts:
                parts = self._capture_parts(key, fn, after_warmup)
                outputs, num_graphs, eager, source = parts.outputs, parts.num_graphs, parts.eager, parts.source
                run = _run_parts(parts)
            else:
                outputs, num_graphs, eager, source = self._backend.capture_one(key, fn, inputs, after_warmup), 1, (), ""
                run = partial(self._backend.replay, key)
            self._device.synchronize()
        except CoreError as error:
            error.add_note(f"while capturing {key} on {self._device.name}")
            raise
        except Exception as error:
            raise CaptureError(
                f"capturing {key} on {self._device.name}",
                found=f"{type(error).__name__}: {error}",
                remedy="run this phase with mode 'off' to see whether it runs eagerly"
                + ("; host reads can't be captured" if is_host_read(error) else ""),
            ) from error
        if reset is not None:
            reset()
        num_bytes = self._device.parts.memory().taken_bytes - warm[0] if warm else 0
        host = cast("UpdateBackend", self._backend).host_arguments(key) if self._updates else frozenset[str]()
        self._entries[key] = _Entry(run, inputs, host, tuple(watched), source)
        return outputs, BucketReport(
            key=key,
            capture_s=time.perf_counter() - start,
            num_bytes=max(num_bytes, 0),
            num_graphs=num_graphs,
            eager=eager,
        )

    def replay(self, key: GraphKey, step: Mapping[str, Any] | None = None) -> tuple[Tensor, ...]:
        """Run the graph of `key` on the present content of its inputs and return its static outputs.

        step: the host-side arguments by name, on a device whose graphs have them. Raises `CaptureError` for a key that
        was not captured and `UsageError` for a step that does not name exactly the captured arguments.
        """
        entry = self._entries.get(key)
        if entry is None:
            raise self.not_captured(key)
        if self._checks or step is not None:
            self._check(key, entry, step)
        entry.num_replays += 1
        outputs = entry.run(step)
        if self.compiles.pending:
            self.compiles.raise_pending()
        return outputs

    def fall_back(self, key: GraphKey, reason: str) -> None:
        """Count an eager run that replaces a replay, and log it once; raise `CaptureError` if strict."""
        if self._strict:
            raise CaptureError(
                f"replaying {key}", found=reason, remedy="compile where these numbers stand; or without strict"
            )
        if reason not in self.fallbacks:
            log.warning("%s runs eagerly: %s", key, reason)
        self.fallbacks[reason] += 1

    def not_captured(self, key: GraphKey) -> CaptureError:
        """Return the error for a key that has no graph."""
        return CaptureError(
            f"replaying {key}",
            found="captured are: " + (", ".join(map(str, self._entries)) or "no keys"),
            remedy="use one of program.keys, or compile with that bucket and a capture mode",
        )

    def replays(self) -> dict[GraphKey, int]:
        """Return how often each captured key was replayed."""
        return {key: entry.num_replays for key, entry in self._entries.items()}

    def since(self, num_kernels: int, notes: Sequence[str]) -> dict[str, Any]:
        """Return what was replayed, run eagerly and compiled, by the names of a report's fields. num_kernels, notes: of
        the compile."""
        return {
            "replays": self.replays(),
            "fallbacks": dict(self.fallbacks),
            "stand_ins": dict(self.stand_ins),
            "oversized": dict(self.oversized),
            "compiles": dict(self.compiles.counts),
            "interim": self.background.interim_runs(),
            "pending": self.background.pending,
            "background_s": self.background.elapsed_s,
            "num_kernels": num_kernels + self.background.num_kernels,
            "notes": (*notes, *self.background.notes),
        }

    def host_arguments(self, key: GraphKey) -> frozenset[str]:
        """Return the names of the host-side arguments that a replay of a captured key has to be given."""
        return self._entries[key].host_arguments

    def source(self, key: GraphKey) -> str:
        """Return the generated Python that replays a key captured in parts; "" for a whole graph."""
        return self._entries[key].source

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Enter around a run of replays: captures are refused, and compiles that happen are counted and named."""
        self._serving += 1
        try:
            with self._backend.replay_session(), self.compiles.watching():
                yield
        finally:
            self._serving -= 1

    def cleanup(self) -> None:
        """Drop all graphs and return their memory; the runner can capture again afterwards."""
        self.background.end()
        self._entries.clear()
        self._backend.cleanup()

    def _capture_parts(self, key: GraphKey, fn: BoundCallable, after_warmup: Callable[[], None]) -> CapturedParts:
        if not hasattr(self._backend, "segment"):
            raise CaptureError(
                f"capturing {key} in parts on {self._device.name}",
                found=f"{type(self._backend).__name__} has no `segment`",
                remedy="use mode 'full' or 'off'; 'piecewise' and 'segmented' are for plugins with a SegmentBackend",
            )
        return capture_parts(
            cast("SegmentBackend", self._backend),
            key,
            fn,
            num_warmups=LATER_PARTS_WARMUPS if self._entries else FIRST_PARTS_WARMUPS,
            after_warmup=after_warmup,
            device=self._device.torch_device,
        )

    def _check(self, key: GraphKey, entry: _Entry, step: Mapping[str, Any] | None) -> None:
        """Refuse host-side arguments that differ from the captured ones, and, in debug mode, memory that has moved."""
        given = frozenset(step or ())
        if given != entry.host_arguments:
            wanted = ", ".join(sorted(entry.host_arguments)) or "none"
            raise UsageError(
                f"replaying {key} with host-side arguments {sorted(given)}",
                found=f"it was captured with: {wanted}; another set would leave stale values in the graph",
                remedy="give exactly these, new at each step: program.replay(key, step={name: value})",
            )
        if self._updates and given:
            cast("UpdateBackend", self._backend).update(key, step or {})
        if self._debug:
            for watched in entry.watched:
                watched.check(key)


def _run_parts(parts: CapturedParts) -> Callable[[Any], tuple[Tensor, ...]]:
    run, outputs = parts.run, parts.outputs

    @torch.no_grad()
    def replay(step: Any) -> tuple[Tensor, ...]:
        run()
        return outputs

    return replay
