"""The hooks of the generic device, for whichever accelerator torch drives: its type is the name that was asked for.

A plugin like any other, and called like any other; only its metadata come from core/host/accelerators.py instead of an
entry point. `core new-plugin --torch-device NAME` writes one that starts from the same parts.
"""

from __future__ import annotations

from functools import partial

from core.accelerator.memory import memory_of
from core.accelerator.parts import open_accelerator
from core.common.conformance import ConformanceProfile
from core.common.graphs.accelerator import AcceleratorGraphs, find_fault
from core.common.graphs.backend import GraphBackendFactory
from core.common.graphs.recorded import RecordedBackend
from core.common.graphs.streams import StreamGraphBackend
from core.common.lowering import INLINE, Lowerings
from core.device import DeviceParts
from core.errors import DeviceUnavailableError
from core.hookspecs import DeviceContext, OpenContext, hookimpl
from core.settings import Settings


@hookimpl
def core_open_device(context: OpenContext) -> DeviceParts:
    """Open the accelerator that torch drives; with CORE_ACCELERATOR_GRAPHS=torch, only if its graphs replay."""
    parts = open_accelerator(context.plugin.device, context.index)
    device = parts.torch_device
    if _torch_graphs() and (fault := find_fault(device)):
        raise DeviceUnavailableError(
            f"device {str(device)!r} with CORE_ACCELERATOR_GRAPHS='torch'",
            found=f"torch.accelerator.Graph can't be used there: {fault}",
            remedy="unset CORE_ACCELERATOR_GRAPHS: graphs are then recorded, which needs nothing of the device",
        )
    return parts


@hookimpl
def core_lowering() -> Lowerings:
    """Run graphs as torch calls: a recording can't hold kernels that Inductor compiled."""
    return INLINE


@hookimpl
def core_graph_backend(context: DeviceContext) -> GraphBackendFactory:
    """Capture by recording, or by torch's own graphs where CORE_ACCELERATOR_GRAPHS says so."""
    device = context.parts.torch_device
    if _torch_graphs():
        return lambda: StreamGraphBackend(AcceleratorGraphs(device))
    return partial(RecordedBackend, device, memory_of(device).hold)


@hookimpl
def core_conformance(context: DeviceContext) -> ConformanceProfile:
    """Declare what torch can't tell of the device."""
    uncounted = memory_of(context.parts.torch_device).uncounted
    if not uncounted:
        return ConformanceProfile()
    return ConformanceProfile(not_supported={"host/memory": f"torch counts no memory of this device: {uncounted}"})


def _torch_graphs() -> bool:
    return Settings.from_environment().accelerator_graphs == "torch"
