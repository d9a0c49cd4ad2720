"""A selected device: everything an engine needs of a plugin, resolved once and frozen.

Nothing here looks a hook up or calls one: the host does that at selection (core/host/selection.py), so that a step of
a running engine costs method calls only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.capabilities import Capabilities as Capabilities
from core.capabilities import Mode as Mode

if TYPE_CHECKING:
    import torch

    from core.common.fakes import FakeOp, FakeResult
    from core.common.graphs.backend import GraphBackendFactory
    from core.common.kernel_compilers import KernelCompiler
    from core.common.lowering import Lowerings
    from core.common.ops.implementation import OpImplementation
    from core.common.passes.declaration import Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginInfo:
    """Where a plugin comes from, read from distribution metadata without importing it."""

    device: str
    distribution: str
    version: str
    #: `module` or `module:attribute`.
    entry_point: str
    #: Likewise, of the probe; "" for a plugin without one.
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
    #: Taken from the device, with caches of the allocator and graphs; None where that is what tensors use.
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


def _no_op() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceParts:
    """What a plugin's `core_open_device` gives: the torch device and the few functions that differ between devices."""

    #: Where tensors of the device live.
    torch_device: torch.device
    capabilities: Capabilities
    #: Reads the allocator.
    memory: Callable[[], MemoryInfo]
    #: Blocks until all work queued on the device is done.
    synchronize: Callable[[], None] = _no_op
    #: Returns unused cached memory to the device.
    empty_cache: Callable[[], None] = _no_op
    #: Begins a new peak of `MemoryInfo`.
    reset_peak_memory: Callable[[], None] = _no_op
    #: Enters a stream apart from the default one, for work that must not mix with a capture.
    side_stream: Callable[[], AbstractContextManager[object]] = nullcontext
    #: Marks the work queued so far and returns what blocks until that much is done; None waits for all work.
    record: Callable[[], Callable[[], None]] | None = None
    #: Those that make kernels of this device besides torch's Inductor.
    kernel_compilers: tuple[KernelCompiler, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator as an engine sees it; made by `core.select_device`, never changed afterwards."""

    name: str
    plugin: PluginInfo
    parts: DeviceParts
    #: How finished graphs become callables.
    lowerings: Lowerings
    #: Makes a fresh `GraphBackend` for each program.
    graph_backend: GraphBackendFactory
    #: The passes that the plugin registered, in that order.
    passes: tuple[Pass, ...] = ()
    #: The implementations of canonical ops that the plugin registered, in that order.
    ops: tuple[OpImplementation, ...] = ()
    #: The fake kernels that the plugin declares, each with what became of it.
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
        """All that may compile kernels of this device, torch's Inductor first."""
        from core.common.kernel_compilers import INDUCTOR

        return (INDUCTOR, *self.parts.kernel_compilers)

    def synchronize(self) -> None:
        """Block until all work queued on the device is done."""
        self.parts.synchronize()

    def record(self) -> Callable[[], None]:
        """Mark the work queued so far; return what blocks until that much is done."""
        record = self.parts.record
        return self.parts.synchronize if record is None else record()

    def __str__(self) -> str:
        return f"{self.name} ({self.capabilities.device_name}; plugin {self.plugin})"
