"""The static buffers that captured graphs read, and host memory of the same layout that fills them by one copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.capture.host_arguments import step_of_mirror
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.errors import UsageError

if TYPE_CHECKING:
    from core.compilation.capture.turns import Turns

_ALIGNMENT = 256
"""Alignment in bytes: that of device allocators, and more than any kernel's widest access."""


class StaticBuffers:
    """One flat storage per phase and input, as large as the phase's largest bucket needs it.

    Every bucket of a phase reads a contiguous view of the phase's storages, so only the bucket being run has valid
    content. Addresses never change. The storages of a phase lie in one run of memory, the largest last: inputs that are
    short in every bucket (decode: one token per sequence) lie close together, however long they are in another phase.
    """

    def __init__(
        self,
        inputs: Mapping[str, InputSpec],
        table: BucketTable,
        device: torch.device,
        bound: Mapping[str, Tensor] | None = None,
    ) -> None:
        """bound: the caller's tensors of the inputs declared "bound", which are used as they are."""
        self.bound = dict(bound or {})
        self._inputs = {name: spec for name, spec in inputs.items() if name not in self.bound}
        self._names = tuple(inputs)
        self._table = table
        self._offsets: dict[str, dict[str, int]] = {}
        self.num_bytes = end = 0
        for phase, keys in table.phases.items():
            sizes = {name: max(self._size(name, table.sizes(key)) for key in keys) for name in self._inputs}
            offsets = self._offsets[phase] = {}
            for name in sorted(sizes, key=sizes.__getitem__):
                offsets[name] = end
                end += -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
            self.num_bytes += sum(sizes.values())
        self.memory = torch.zeros(end, dtype=torch.uint8, device=device)
        self.fill(self.memory)

    def fill(self, memory: Tensor) -> None:
        """Write the first content of all buffers into `memory`, which is laid out like them: sentinels, else zero."""
        memory.zero_()
        places = sorted((at, name) for offsets in self._offsets.values() for name, at in offsets.items())
        ends = [*(at for at, _ in places[1:]), memory.numel()]
        for (start, name), end in zip(places, ends, strict=True):
            spec = self._inputs[name]
            if spec.padding == "sentinel":
                memory[start:end].view(spec.dtype).fill_(spec.value)

    def views(self, key: GraphKey, memory: Tensor | None = None) -> dict[str, Tensor]:
        """Return the buffers of one bucket by input name, each contiguous and of the bucket's shape.

        memory: other memory of the same layout to view instead of the buffers'; it has no bound inputs.
        """
        sizes = self._table.sizes(key)
        found = {} if memory is not None else dict(self.bound)
        with torch.inference_mode(False):  # views that are made in that mode can be written to in it alone
            for name, offset in self._offsets[key.phase].items():
                spec = self._inputs[name]
                part = (self.memory if memory is None else memory)[offset : offset + self._size(name, sizes)]
                found[name] = part.view(spec.dtype).view(spec.resolve(sizes))
        return {name: found[name] for name in self._names if name in found}

    def span(self, key: GraphKey, without: Collection[str] = ()) -> slice:
        """Return the range of bytes that holds all inputs of a bucket except those in `without`."""
        sizes = self._table.sizes(key)
        offsets = self._offsets[key.phase]
        start = min(offsets.values(), default=0)
        ends = (offset + self._size(name, sizes) for name, offset in offsets.items() if name not in without)
        return slice(start, max(ends, default=start))

    def _size(self, name: str, sizes: Mapping[str, int]) -> int:
        spec = self._inputs[name]
        return prod(spec.resolve(sizes)) * spec.dtype.itemsize


class Staging:
    """Host memory in which a step's inputs are prepared, and moved to the device by a single copy; see
    `Program.staging`.

    Several mirrors of the static buffers are used in turn, so that one can be written while another is still being
    copied. With n mirrors, the copy of one `replay` must have finished before n - 1 further replays.
    """

    def __init__(
        self,
        buffers: StaticBuffers,
        replay: Callable[[GraphKey, Any], Any],
        turns: Turns,
        *,
        mirrors: int,
        pinned: bool,
        host_arguments: Callable[[GraphKey], Collection[str]] | None = None,
    ) -> None:
        self._buffers = buffers
        self._replay = replay
        self._turns = turns
        self._host_arguments = host_arguments
        self._mirrors = [self._mirror(pinned) for _ in range(mirrors)]
        # Needed at each step, and constant.
        self._views = [cache(partial(buffers.views, memory=mirror)) for mirror in self._mirrors]
        self._device_views = cache(buffers.views)
        self._parts = [cache(partial(self._part, mirror)) for mirror in self._mirrors]
        self._current = 0

    @property
    def current(self) -> int:
        """Number of the mirror that `inputs` gives and the next `replay` sends."""
        return self._current

    def inputs(self, key: GraphKey) -> Mapping[str, Tensor]:
        """Return the bucket's inputs in the current mirror, on the host, to be written before `replay`.

        They hold what was last written to this mirror for any bucket; padding is the caller's to write.
        """
        return self._views[self._current](key)

    def replay(
        self,
        key: GraphKey,
        *,
        feed: Mapping[str, Tensor] | None = None,
        kept: Collection[str] = (),
        step: Mapping[str, Any] | None = None,
    ) -> Any:
        """Copy the current mirror to the device, replay the bucket, and turn to the next mirror; wait for nothing.

        - feed: tensors on the device that replace the mirror's, each no longer than the bucket's along the first
          dimension; outputs of the replay before may be given.
        - kept: inputs whose buffers already hold the right content; some of them may still be copied.
        - step: as of `Program.replay`; without one, host-side arguments that are inputs get the mirror's values.

        Returns what `Program.replay` does.
        """
        if self._host_arguments is not None and step is None and (names := self._host_arguments(key)):
            step = step_of_mirror(key, names, self.inputs(key), {*kept, *(feed or ())})
        target, source = self._parts[self._current](key, tuple(kept))
        turns = self._turns
        before = turns.begun
        if turns.busy_part():
            raise turns.refused_part()
        with turns.lock:
            turns.begin(before)
            target.copy_(source, non_blocking=True)
            for name, tensor in (feed or {}).items():
                self._device_views(key)[name][: tensor.shape[0]].copy_(tensor)
            self._current = (self._current + 1) % len(self._mirrors)
            return self._replay(key, step)

    def _part(self, mirror: Tensor, key: GraphKey, kept: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return the memory of a bucket's inputs without `kept`, on the device and in a mirror."""
        span = self._buffers.span(key, kept)
        return self._buffers.memory[span], mirror[span]

    def _mirror(self, pinned: bool) -> Tensor:
        mirror = torch.empty(self._buffers.memory.numel(), dtype=torch.uint8, pin_memory=pinned)
        self._buffers.fill(mirror)
        return mirror


def check_mirrors(mirrors: int) -> None:
    """Raise `UsageError` unless there is at least one mirror."""
    if not isinstance(mirrors, int) or isinstance(mirrors, bool) or mirrors < 1:
        raise UsageError(
            f"staging with mirrors={mirrors!r}",
            found="that is no number of mirrors",
            remedy="ask for 1, or for 2 to prepare a step while the one before it runs",
        )
