"""A fake vendor's plugin that implements every hook; tests install it from its source."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.common.conformance import ConformanceProfile
from core.common.fakes import FakeOp, like
from core.common.graphs.backend import CallBackend, GraphBackendFactory
from core.common.lowering import Lowerings, inline
from core.common.ops.implementation import OpImplementation
from core.common.passes.declaration import Pass
from core.common.passes.results import PassResult
from core.device import Capabilities, DeviceParts, MemoryInfo
from core.hookspecs import DeviceContext, OpenContext, hookimpl


class Backend(CallBackend):
    """A graph backend that tests can tell from the default one."""


@hookimpl
def core_open_device(context: OpenContext) -> DeviceParts:
    """Open a device that lives in host memory."""
    return DeviceParts(
        torch_device=torch.device("cpu"),
        capabilities=Capabilities(device_name="Acme Full", dtypes=frozenset({torch.float32})),
        memory=lambda: MemoryInfo(used_bytes=0, total_bytes=1, peak_bytes=0),
    )


@hookimpl
def core_lowering(context: DeviceContext) -> Lowerings:
    """Offer one lowering under a name of its own."""
    return Lowerings(available={"own": inline}, default="own")


@hookimpl
def core_graph_backend() -> GraphBackendFactory:
    """Return the backend's class; an implementation may leave `context` out."""
    return Backend


@hookimpl
def core_register_passes(context: DeviceContext) -> Sequence[Pass]:
    """Declare a pass that matches nothing."""
    return [Pass(name="acme_fuse", run=lambda graph: PassResult(matched=0))]


@hookimpl
def core_register_ops(context: DeviceContext) -> Sequence[OpImplementation]:
    """Register an implementation that is never called."""
    return [OpImplementation(op="core::attention", name="acme_attention", fn=abs)]


@hookimpl
def core_register_fakes(context: DeviceContext) -> Sequence[FakeOp]:
    """Declare a fake kernel for an op that is not installed."""
    return [FakeOp(op="acme_absent::f", rule=like())]


@hookimpl
def core_conformance(context: DeviceContext) -> ConformanceProfile:
    """Declare one limit, which names the device that was opened."""
    return ConformanceProfile(not_supported={"ops/*": f"not on {context.parts.capabilities.device_name}"})
