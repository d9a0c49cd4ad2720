"""The plugin of device "npu": opens an Ascend NPU through torch_npu.

The present state: the device opens and runs models eagerly or through the default lowerings; it has no graph backend of
its own, so its only mode is "off".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from core.device import Capabilities, DeviceParts, MemoryInfo
from core.errors import DeviceUnavailableError
from core.hookspecs import OpenContext, hookimpl
from core_npu.probe import probe


@hookimpl
def core_open_device(context: OpenContext) -> DeviceParts:
    """Open the NPU and make it the current one of the process; torch_npu is imported only where the probe found all."""
    asked = f"device 'npu:{context.index}'"
    found = probe()
    if not found.available:
        raise DeviceUnavailableError(asked, found=found.reason, remedy=found.hint)
    npu = _import_runtime(asked)
    num_devices = npu.device_count()
    if context.index >= num_devices:
        raise DeviceUnavailableError(
            asked,
            found=f"{num_devices} visible device(s), counted from 0",
            remedy="choose a smaller index, or make more devices visible with ASCEND_RT_VISIBLE_DEVICES",
        )
    npu.set_device(context.index)
    stream = npu.Stream()
    return DeviceParts(
        torch_device=torch.device("npu", context.index),
        capabilities=Capabilities(
            device_name=npu.get_device_name(context.index),
            dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
            modes=("off",),
            fp64=False,
        ),
        memory=partial(_memory, npu, context.index),
        synchronize=partial(npu.synchronize, context.index),
        empty_cache=npu.empty_cache,
        reset_peak_memory=partial(npu.reset_peak_memory_stats, context.index),
        side_stream=lambda: npu.stream(stream),
    )


def _import_runtime(asked: str) -> Any:
    """Import torch_npu, which registers the device with torch as `torch.npu`, and return that module."""
    try:
        import torch_npu
    except Exception as error:
        # A torch_npu made for another torch or CANN fails here with whatever its loader meets first.
        raise DeviceUnavailableError(
            asked,
            found=f"torch_npu is installed and cannot be imported: {type(error).__name__}: {error}",
            remedy=f"install the torch_npu made for torch {torch.__version__} and the installed CANN",
        ) from error
    npu = torch_npu.npu
    if not npu.is_available():
        raise DeviceUnavailableError(
            asked,
            found="torch_npu is imported and reports no usable NPU",
            remedy="run npu-smi info; driver, firmware and CANN must be of versions that fit each other",
        )
    return npu


def _memory(npu: Any, index: int) -> MemoryInfo:
    return MemoryInfo(
        used_bytes=npu.memory_allocated(index),
        total_bytes=npu.mem_get_info(index)[1],
        peak_bytes=npu.max_memory_allocated(index),
    )
