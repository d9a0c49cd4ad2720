"""The plugin of device "npu": opens an Ascend NPU through torch_npu and captures with NPU graphs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from core.common.conformance import ConformanceProfile
from core.common.fakes import FakeOp
from core.common.graphs.backend import GraphBackendFactory
from core.common.graphs.streams import capture_lock
from core.common.graphs.weak import weak_by
from core.common.lowering import INLINE, Lowerings
from core.common.ops.implementation import OpImplementation
from core.common.passes import Pass
from core.device import Capabilities, DeviceParts, MemoryInfo
from core.errors import DeviceUnavailableError
from core.hookspecs import DeviceContext, OpenContext, hookimpl
from core_npu.fakes.declared import NPU_FAKES, NPU_WRITES
from core_npu.probe import SIMULATED, probe
from core_npu.runner import NPUGraphBackend
from core_npu.task_queue import task_queue


@hookimpl
def core_open_device(context: OpenContext) -> DeviceParts:
    """Open the NPU and make it the current one of the process; torch_npu is imported only if the probe found
    everything."""
    asked = f"device 'npu:{context.index}'"
    found = probe()
    if not found.available:
        raise DeviceUnavailableError(asked, found=found.reason, remedy=found.hint)
    torch_npu = _import_runtime(asked)
    npu = torch_npu.npu
    num_devices = npu.device_count()
    if context.index >= num_devices:
        raise DeviceUnavailableError(
            asked,
            found=f"{num_devices} visible device(s), counted from 0",
            remedy="choose a smaller index, or make more devices visible with ASCEND_RT_VISIBLE_DEVICES",
        )
    npu.set_device(context.index)
    # Without this torch_npu, at the first call of the process, picks a GELU kernel that ignores the requested form.
    npu.use_compatible_impl(True)
    stream = npu.Stream()
    name, simulated = npu.get_device_name(context.index), _is_simulated()
    # Storages of the device hold the format of their memory, which its kernels read.
    device = torch.device("npu", context.index)
    weak_by(device, torch_npu._C._weak_ref_tensor)
    return DeviceParts(
        torch_device=device,
        capabilities=Capabilities(
            device_name=f"{name} (simulated on the host)" if simulated else name,
            dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
            modes=("full", "piecewise", "segmented"),
            fp64=False,
            update=True,
            asynchronous=True,
            # torch_npu's elementwise ops allocate their results in order, whatever the order of their inputs.
            keeps_strides=False,
            extra={"simulated": simulated, "torch_npu_version": torch_npu.__version__},
        ),
        memory=partial(_memory, npu, context.index),
        synchronize=partial(_synchronize, npu, context.index),
        empty_cache=npu.empty_cache,
        reset_peak_memory=partial(npu.reset_peak_memory_stats, context.index),
        side_stream=lambda: npu.stream(stream),
        record=partial(_record, npu),
    )


@hookimpl
def core_register_passes() -> Sequence[Pass]:
    """Fuse neighbouring calls of torch_npu's own ops in models."""
    from core_npu.passes.registry import available

    return available()


@hookimpl
def core_register_ops() -> Sequence[OpImplementation]:
    """Implement canonical ops by the kernels of torch_npu."""
    from core_npu.implementations import IMPLEMENTATIONS

    return IMPLEMENTATIONS


@hookimpl
def core_register_fakes() -> Sequence[FakeOp]:
    """Let models that call torch_npu's own ops be traced, where it brings no fakes of them."""
    return (*NPU_FAKES, *NPU_WRITES)


@hookimpl
def core_lowering() -> Lowerings:
    """Run the graph's own Python, whose kernels the graph captures."""
    return INLINE


@hookimpl
def core_graph_backend(context: DeviceContext) -> GraphBackendFactory:
    """Capture with NPU graphs, one memory pool per program."""
    return partial(NPUGraphBackend, context.parts.torch_device)


@hookimpl
def core_conformance() -> ConformanceProfile:
    """Declare where host-side lists are renewed, and give a call to try it on."""
    from core_npu.conformance import PROFILE

    return PROFILE


def _import_runtime(asked: str) -> Any:
    """Import torch_npu, which registers the device with torch as `torch.npu`, and return it."""
    try:
        import torch_npu
    except Exception as error:
        # A torch_npu built for another torch or CANN may fail here with any error of its loader.
        raise DeviceUnavailableError(
            asked,
            found=f"torch_npu is installed and cannot be imported: {type(error).__name__}: {error}",
            remedy=f"install the torch_npu made for torch {torch.__version__} and the installed CANN",
        ) from error
    if _is_simulated() and os.environ.get(SIMULATED) != "1":
        raise DeviceUnavailableError(
            asked,
            found="the loaded ACL runtime is a simulation for tests: it computes on the host",
            remedy=f"source CANN's set_env.sh, so that its own is found first; for tests, set {SIMULATED}=1",
        )
    if not torch_npu.npu.is_available():
        raise DeviceUnavailableError(
            asked,
            found="torch_npu is imported and reports no usable NPU",
            remedy="run npu-smi info; driver, firmware and CANN must be of versions that fit each other",
        )
    return torch_npu


def _is_simulated() -> bool:
    """Return whether the runtime that torch_npu has loaded is the one of the tests."""
    try:
        return hasattr(ctypes.CDLL("libascendcl.so"), "ascend_sim_version")
    except OSError:
        return False


def _synchronize(npu: Any, index: int) -> None:
    """Wait for all work of the NPU, but first for another thread's capture, which a synchronisation would break.

    This is where failures of torch_npu's task queue show: raises `DeviceUnavailableError` if a failure has ended the
    queue.
    """
    device = torch.device("npu", index)
    with capture_lock(device), task_queue(device).watched("waiting for the NPU"):
        npu.synchronize(index)


def _record(npu: Any) -> Callable[[], None]:
    event = npu.Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _memory(npu: Any, index: int) -> MemoryInfo:
    free_bytes, total_bytes = npu.mem_get_info(index)
    return MemoryInfo(
        used_bytes=npu.memory_allocated(index),
        total_bytes=total_bytes,
        peak_bytes=npu.max_memory_allocated(index),
        held_bytes=total_bytes - free_bytes,
    )
