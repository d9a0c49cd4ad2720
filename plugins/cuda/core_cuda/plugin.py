"""The plugin of device "cuda": opens an NVIDIA GPU and captures with CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch

from core.common.graphs.backend import GraphBackendFactory
from core.common.graphs.streams import capture_lock
from core.common.kernel_compilers import KernelCompiler
from core.common.lowering import Lowerings
from core.common.ops.implementation import OpImplementation
from core.common.passes import Pass
from core.device import Capabilities, DeviceParts, MemoryInfo
from core.errors import DeviceUnavailableError
from core.hookspecs import DeviceContext, OpenContext, hookimpl
from core_cuda import exchange
from core_cuda.compiler import TRITON, begin_key
from core_cuda.copying import copy_in
from core_cuda.lowerings import LOWERINGS
from core_cuda.peers import PEERS
from core_cuda.probe import probe
from core_cuda.runner import cuda_graph_backend
from core_cuda.sleeping import DeviceMemory

log = logging.getLogger("core.cuda")
_BFLOAT16_CAPABILITY = (8, 0)
_KERNEL_CAPABILITY = (8, 0)
"""The least compute capability: needed by Triton, and by the kernels' asynchronous copies and bfloat16 products."""


@hookimpl
def core_open_device(context: OpenContext) -> DeviceParts:
    """Open the GPU and make it the current CUDA device of the process, as kernels of foreign libraries expect."""
    _require(context.index)
    device = torch.device("cuda", context.index)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    dtypes = {torch.float32, torch.float16, torch.float64}
    if capability >= _BFLOAT16_CAPABILITY:
        dtypes.add(torch.bfloat16)
    stream = torch.cuda.Stream(device)
    missing = kernels_missing(capability)
    if missing:
        log.warning("no kernels of the plugin, models run on torch's own: %s", missing)
    else:
        begin_key()
    return DeviceParts(
        torch_device=device,
        capabilities=Capabilities(
            device_name=properties.name,
            dtypes=frozenset(dtypes),
            modes=("full", "piecewise", "segmented"),
            asynchronous=True,
            device_lengths=not missing,
            extra={
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "cuda_version": torch.version.cuda or "",
                "kernels": f"none: {missing}" if missing else f"triton {version('triton')}",
            },
        ),
        memory=partial(_memory, device),
        synchronize=partial(_synchronize, device),
        empty_cache=torch.cuda.empty_cache,
        reset_peak_memory=partial(torch.cuda.reset_peak_memory_stats, device),
        side_stream=lambda: torch.cuda.stream(stream),
        record=_record,
        copy_in=partial(copy_in, device),
        sleeping_memory=partial(DeviceMemory, device),
        kernel_compilers=(TRITON,) if missing else (TRITON, _flashinfer()),
        peers=PEERS,
    )


@hookimpl
def core_register_ops(context: DeviceContext) -> Sequence[OpImplementation]:
    """Implement canonical ops by the plugin's kernels, where these can run."""
    properties = torch.cuda.get_device_properties(context.parts.torch_device)
    if kernels_missing((properties.major, properties.minor)):
        return ()
    from core_cuda import collective, collective_linear, collective_norm
    from core_cuda.flashinfer.implementations import implementations
    from core_cuda.implementations import IMPLEMENTATIONS

    collectives = (collective, collective_norm, collective_linear)
    return (*IMPLEMENTATIONS, *(each for module in collectives for each in module.IMPLEMENTATIONS), *implementations())


@hookimpl
def core_register_passes(context: DeviceContext) -> Sequence[Pass]:
    """Rewrite graphs for kernels of the plugin that implement no canonical op, where these can run."""
    properties = torch.cuda.get_device_properties(context.parts.torch_device)
    if kernels_missing((properties.major, properties.minor)):
        return ()
    from core_cuda.passes.registry import PASSES

    return PASSES


def _flashinfer() -> KernelCompiler:
    """Return FlashInfer's compiler, which imports Triton."""
    from core_cuda.flashinfer.building import compiler

    return compiler()


def kernels_missing(capability: tuple[int, int]) -> str:
    """Return why the plugin's kernels can't run on a GPU of this compute capability, or ""."""
    if capability < _KERNEL_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (_KERNEL_CAPABILITY, capability))
        return f"they need compute capability {needed}, and the GPU has {found}"
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return ""


@hookimpl
def core_lowering() -> Lowerings:
    """Run the graph's own Python, whose kernels the graph captures; Inductor on request."""
    return LOWERINGS


@hookimpl
def core_graph_backend(context: DeviceContext) -> GraphBackendFactory:
    """Capture with CUDA graphs, one memory pool per program."""
    return partial(cuda_graph_backend, context.parts.torch_device)


def _require(index: int) -> None:
    """Raise the error that names what is missing: the driver, a device, CUDA in torch, or that index."""
    asked = f"device 'cuda:{index}'"
    found = probe()
    if not found.available:
        raise DeviceUnavailableError(asked, found=found.reason, remedy=found.hint)
    if torch.version.cuda is None:
        raise DeviceUnavailableError(
            asked,
            found=f"the GPU is present ({found.reason}), but torch {torch.__version__} is built without CUDA",
            remedy="install a CUDA build of torch, see https://pytorch.org/get-started/locally",
        )
    if not torch.cuda.is_available():
        raise DeviceUnavailableError(
            asked,
            found=f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPU: {found.reason}",
            remedy="install a torch whose CUDA version the driver supports, or update the driver",
        )
    if index >= torch.cuda.device_count():
        raise DeviceUnavailableError(
            asked,
            found=f"{torch.cuda.device_count()} visible device(s), counted from 0",
            remedy="choose a smaller index, or make more devices visible with CUDA_VISIBLE_DEVICES",
        )


def _synchronize(device: torch.device) -> None:
    """Wait for all work of the GPU, but first for another thread's capture, which a synchronisation would break."""
    with capture_lock(device):
        torch.cuda.synchronize(device)


def _record() -> Callable[[], None]:
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _memory(device: torch.device) -> MemoryInfo:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    shared_bytes = exchange.held_bytes()
    return MemoryInfo(
        used_bytes=torch.cuda.memory_allocated(device) + shared_bytes,
        total_bytes=total_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(device) + shared_bytes,
        held_bytes=total_bytes - free_bytes,
    )
