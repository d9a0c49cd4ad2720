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
    """Where a plugin comes from, read from distribution metadata without importing it.

    entry_point is `module` or `module:attribute`; requires_core is the specifier of its `Requires-Dist: core` ("" when
    it states none); in_tree is true for the plugins that ship with `core`.
    """

    device: str
    distribution: str
    version: str
    entry_point: str
    probe_entry_point: str = ""
    requires_core: str = ""
    in_tree: bool = False

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryInfo:
    """Memory of one device in bytes; `total` is what the process may use, `peak` of `used` since the last reset.

    used_bytes: in use by tensors. held_bytes: taken from the device, with caches of the allocator and graphs; None
    where that is the same.
    """

    used_bytes: int
    total_bytes: int
    peak_bytes: int
    held_bytes: int | None = None

    @property
    def taken_bytes(self) -> int:
        """Everything taken from the device."""
        return self.used_bytes if self.held_bytes is None else self.held_bytes


def _no_op() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceParts:
    """What a plugin's `core_open_device` gives: the torch device and the few functions that differ between devices.

    synchronize blocks until all work queued on the device is done. memory reads the allocator. empty_cache returns
    unused cached memory to the device. side_stream enters a stream apart from the default one (for work that must not
    mix with a capture); on devices without streams it does nothing. record marks the work queued so far and returns
    what blocks until that much is done; without it, `Device.record` waits for all work. kernel_compilers: those that
    make kernels of this device besides torch's Inductor.
    """

    torch_device: torch.device
    capabilities: Capabilities
    memory: Callable[[], MemoryInfo]
    synchronize: Callable[[], None] = _no_op
    empty_cache: Callable[[], None] = _no_op
    reset_peak_memory: Callable[[], None] = _no_op
    side_stream: Callable[[], AbstractContextManager[object]] = nullcontext
    record: Callable[[], Callable[[], None]] | None = None
    kernel_compilers: tuple[KernelCompiler, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator as an engine sees it; made by `core.select_device`, never changed afterwards.

    lowerings: how finished graphs become callables. graph_backend: makes a fresh `GraphBackend` per program.
    passes, ops: what the plugin registered, in registration order. fakes: what became of each declared fake kernel.
    reason: why this device was chosen (for `--device auto`, also why the others were not).
    """

    name: str
    plugin: PluginInfo
    parts: DeviceParts
    lowerings: Lowerings
    graph_backend: GraphBackendFactory
    passes: tuple[Pass, ...] = ()
    ops: tuple[OpImplementation, ...] = ()
    fakes: tuple[tuple[FakeOp, FakeResult], ...] = ()
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
