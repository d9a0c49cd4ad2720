"""A selected device: everything an engine needs of a plugin, resolved once and frozen.

Nothing here looks a hook up or calls one: the host does that at selection (core/host/selection.py), so that a step of
a running engine costs method calls only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from core.capabilities import Capabilities as Capabilities
from core.capabilities import Mode as Mode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from core.common.fakes import FakeOp, FakeResult
    from core.common.graphs.backend import GraphBackendFactory
    from core.common.kernel_compilers import KernelCompiler
    from core.common.lowering import Lowerings
    from core.common.ops.implementation import OpImplementation
    from core.common.passes.declaration import Pass
    from core.common.peers import Peer


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginInfo:
    """Where a plugin comes from, read from distribution metadata without importing it."""

    device: str
    distribution: str
    version: str
    #: `module` or `module:attribute`.
    entry_point: str
    #: The same for the probe; "" for a plugin without one.
    probe_entry_point: str = ""
    #: The specifier of its `Requires-Dist: core`; "" where it states none.
    requires_core: str = ""
    #: True for the plugins that ship with `core`.
    in_tree: bool = False

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryInfo:
    """Memory of one device."""

    #: In use by tensors.
    used_bytes: int
    #: What the process may use.
    total_bytes: int
    #: The most that tensors used since the last reset.
    peak_bytes: int
    #: Taken from the device, including the allocator's cache and graphs; None if only tensors use memory.
    held_bytes: int | None = None

    @property
    def taken_bytes(self) -> int:
        """Everything taken from the device."""
        return self.used_bytes if self.held_bytes is None else self.held_bytes

    @classmethod
    def from_torch(cls, device: torch.device) -> MemoryInfo:
        """Read what `torch.accelerator` counts of a device.

        torch raises RuntimeError where the device is not its accelerator, or has an allocator that counts nothing.
        """
        import torch

        counts = torch.accelerator
        _, total = counts.get_memory_info(device)
        return cls(
            used_bytes=counts.memory_allocated(device),
            total_bytes=total,
            peak_bytes=counts.max_memory_allocated(device),
            held_bytes=counts.memory_reserved(device),
        )


class SleepingMemory(Protocol):
    """Memory of one device that can be given back and taken again at the same addresses, all of it at once.

    Captured graphs hold addresses: what they read may sleep in such memory while they stay. An engine makes one for
    weights and one for its cache, and calls the methods while nothing runs on the device.
    """

    #: True where it is memory of the host itself: weights that are to be kept stay where they are, as a copy on the
    #: host would save nothing.
    in_host_memory: bool

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a tensor (num_bytes,) uint8 of any content, with a storage of its own; num_bytes is at least 1.

        The memory lives as long as the tensor's storage, whatever becomes of this object. Raises
        `torch.OutOfMemoryError` where there is none.
        """

    def release(self) -> None:
        """Give the memory of all living tensors back to the device; what they hold is lost, their addresses stay.

        Until `restore` nobody touches these tensors.
        """

    def restore(self) -> None:
        """Take memory for all living tensors again, of any content, at the addresses they have.

        Raises `torch.OutOfMemoryError`, with nothing taken, where there is not enough.
        """


CopyIn = Callable[["Sequence[Tensor]"], "list[Tensor]"]
"""Copies tensors of the host's memory to a device."""


def _no_op() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceParts:
    """The result of a plugin's `core_open_device`: the torch device and the few functions that differ between
    devices."""

    #: Where tensors of the device live.
    torch_device: torch.device
    capabilities: Capabilities
    #: Reads the allocator's counters.
    memory: Callable[[], MemoryInfo]
    #: Blocks until all work queued on the device is done.
    synchronize: Callable[[], None] = _no_op
    #: Returns unused cached memory to the device.
    empty_cache: Callable[[], None] = _no_op
    #: Resets the peak of `MemoryInfo`.
    reset_peak_memory: Callable[[], None] = _no_op
    #: Enters a stream apart from the default one, for work that must not mix with a capture.
    side_stream: Callable[[], AbstractContextManager[object]] = nullcontext
    #: Marks the work queued so far and returns a function that waits for it; None waits for all work.
    record: Callable[[], Callable[[], None]] | None = None
    #: Copies tensors of the host's memory to the device, in order, valid for all work that is queued from then on; None
    #: where `Tensor.to` is the fastest way.
    copy_in: CopyIn | None = None
    #: Makes memory that can sleep (see `SleepingMemory`); None where the device has none.
    sleeping_memory: Callable[[], SleepingMemory] | None = None
    #: Whether weights are read faster from `sleeping_memory` than from the allocator's: an engine then moves them there
    #: when it is made, whether it is to sleep or not.
    places_weights: bool = False
    #: Compilers of this device's kernels besides torch's Inductor.
    kernel_compilers: tuple[KernelCompiler, ...] = ()
    #: Other ways to run a model on this device, which `core bench` measures in turns with `core`.
    peers: tuple[Peer, ...] = ()
    #: Measures reading of memory larger than all caches, for the floor of `core bench`: threads -> bytes per second.
    #: None where a copy's rate serves.
    read_rates: Callable[[], Mapping[int, float]] | None = None
    #: Begins work in the background that programs will wait for, such as compiling kernels, and returns at once. Called
    #: before a model is loaded that is to be compiled.
    prepare: Callable[[], None] = _no_op


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator as an engine sees it; made by `core.select_device`, never changed afterwards."""

    name: str
    plugin: PluginInfo
    parts: DeviceParts
    #: The lowerings, which turn finished graphs into callables.
    lowerings: Lowerings
    #: Makes a fresh `GraphBackend` for each program.
    graph_backend: GraphBackendFactory
    #: The passes that the plugin registered, in that order.
    passes: tuple[Pass, ...] = ()
    #: The implementations of canonical ops that the plugin registered, in that order.
    ops: tuple[OpImplementation, ...] = ()
    #: The fake kernels that the plugin declares, each with the outcome of its registration.
    fakes: tuple[tuple[FakeOp, FakeResult], ...] = ()
    #: Why this device was chosen (for `--device auto`, also why the others were not).
    reason: str = ""

    @property
    def torch_device(self) -> torch.device:
        """The `torch.device` on which tensors of this device live."""
        return self.parts.torch_device

    @property
    def capabilities(self) -> Capabilities:
        """What the device can do, as data."""
        return self.parts.capabilities

    @property
    def kernel_compilers(self) -> tuple[KernelCompiler, ...]:
        """All compilers of this device's kernels, torch's Inductor first."""
        from core.common.kernel_compilers import INDUCTOR

        return (INDUCTOR, *self.parts.kernel_compilers)

    def synchronize(self) -> None:
        """Block until all work queued on the device is done."""
        self.parts.synchronize()

    def record(self) -> Callable[[], None]:
        """Mark the work queued so far; return a function that waits for it."""
        record = self.parts.record
        return self.parts.synchronize if record is None else record()

    def __str__(self) -> str:
        return f"{self.name} ({self.capabilities.device_name}; plugin {self.plugin})"
