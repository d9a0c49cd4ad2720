"""The hooks of the Acme plugin; `core` imports this module only when `--device acme` was chosen."""

from __future__ import annotations

import torch
from core.common.conformance import ConformanceProfile
from core.common.fakes import FakeOp, half_last
from core.common.graphs.backend import GraphBackendFactory
from core.common.lowering import Lowerings
from core.common.lowerings import INLINE
from core.common.passes.declaration import Pass
from core.device import Capabilities, DeviceParts
from core.errors import DeviceUnavailableError
from core.hookspecs import OpenContext, hookimpl

from core_acme.memory import CARD
from core_acme.passes import declarations
from core_acme.probe import probe
from core_acme.runner import RecordingBackend


@hookimpl
def core_open_device(context: OpenContext) -> DeviceParts:
    """Open the simulated device; the answer of the probe is confirmed, since it may be old by now."""
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
    )


@hookimpl
def core_lowering() -> Lowerings:
    """Offer `inline` alone: the recorder sees no kernels that Inductor compiled, and would replay stale outputs."""
    return INLINE


@hookimpl
def core_graph_backend() -> GraphBackendFactory:
    """Capture by recording. The context is not needed here, so it is not taken."""
    return RecordingBackend


@hookimpl
def core_register_passes() -> tuple[Pass, ...]:
    """Register the one pass of this plugin."""
    return declarations()


@hookimpl
def core_register_fakes() -> tuple[FakeOp, ...]:
    """Teach tracing the shape of Acme's gated activation; skipped with a line where the kernels are not installed."""
    return (FakeOp(op="acme_kernels::silu_and_mul", rule=half_last()),)


@hookimpl
def core_conformance() -> ConformanceProfile:
    """Declare no exception: the recorder does all that its modes promise."""
    return ConformanceProfile()
