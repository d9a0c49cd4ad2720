"""The hooks of the Acme plugin; `core` imports this module only when `--device acme` was chosen."""

from __future__ import annotations

import torch
from core.common.conformance import ConformanceProfile
from core.common.fakes import FakeOp
from core.common.graphs.backend import GraphBackendFactory
from core.common.lowering import INLINE, Lowerings
from core.common.ops.implementation import OpImplementation
from core.common.passes import Pass
from core.device import Capabilities, DeviceParts
from core.errors import DeviceUnavailableError
from core.hookspecs import OpenContext, hookimpl

from core_acme import faults, foreign, ops
from core_acme.host_arguments import window_sum_example
from core_acme.memory import CARD, CardMemory
from core_acme.passes import declarations
from core_acme.probe import probe
from core_acme.runner import RecordingBackend


@hookimpl
def core_open_device(context: OpenContext) -> DeviceParts:
    """Open the simulated device. What hooks give is handed through `planted`, which a real plugin has no need of."""
    faults.check()
    return faults.planted("core_open_device", _open)(context)


def _open(context: OpenContext) -> DeviceParts:
    """Open the card; the answer of the probe is confirmed, since it may be old by now."""
    found = probe()
    if context.index >= found.device_count:
        raise DeviceUnavailableError(
            f"device {context.plugin.device!r}, index {context.index}",
            found=f"{found.device_count} device(s): {found.reason}",
            remedy=found.hint or f"choose an index below {found.device_count}",
        )
    return DeviceParts(
        torch_device=torch.device("cpu"),
        capabilities=Capabilities(
            device_name="Acme A1 (simulated)",
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            modes=("full", "piecewise", "segmented"),
            update=True,
        ),
        memory=CARD.read,
        reset_peak_memory=CARD.reset_peak,
        sleeping_memory=CardMemory,
        # kernel_compilers stays empty: its kernels come with the plugin, and nothing compiles any.
    )


@hookimpl
def core_lowering() -> Lowerings:
    """Offer `inline` alone: the recorder sees no kernels that Inductor compiled, and would replay stale outputs."""
    return INLINE


@hookimpl
def core_graph_backend() -> GraphBackendFactory:
    """Capture by recording. The context is not needed here, so it is not taken."""
    return faults.planted("core_graph_backend", RecordingBackend)


@hookimpl
def core_register_passes() -> tuple[Pass, ...]:
    """Register the one pass of this plugin."""
    return faults.planted("core_register_passes", declarations())


@hookimpl
def core_register_ops() -> tuple[OpImplementation, ...]:
    """Register Acme's kernels for canonical ops."""
    return faults.planted("core_register_ops", ops.IMPLEMENTATIONS)


@hookimpl
def core_register_fakes() -> tuple[FakeOp, ...]:
    """Teach tracing the shapes of a library that brings no fake kernels."""
    return faults.planted("core_register_fakes", foreign.FAKES)


@hookimpl
def core_conformance() -> ConformanceProfile:
    """Declare no exception: the recorder does all that its modes promise."""
    return ConformanceProfile(host_argument_example=window_sum_example)
