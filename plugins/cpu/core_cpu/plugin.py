"""The plugin of device "cpu". Read this first when writing one: a device is the functions below and nothing else.

Two entry points in pyproject.toml lead here: `core.plugins` names this module under the device's name, and
`core.probes` names the torch-free function that tells whether the device is present (probe.py). torch and the vendor's
own libraries may be imported here: this module is loaded only when its device is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from core.common.fakes import FakeOp
from core.common.graphs.backend import CallBackend, GraphBackendFactory
from core.common.lowering import INLINE, Lowerings
from core.common.ops.implementation import OpImplementation
from core.common.passes import Pass
from core.device import Capabilities, DeviceParts
from core.errors import DeviceUnavailableError
from core.hookspecs import DeviceContext, OpenContext, hookimpl
from core_cpu.aot.lowering import AOT_INDUCTOR, begin_inductor, inductor
from core_cpu.compiler import find_cxx_compiler, missing, refuse
from core_cpu.extension import KERNELS, identity, prepare
from core_cpu.extension import why_not as why_no_kernels
from core_cpu.fakes import SGL_KERNEL, TORCH_IPEX
from core_cpu.ipex import norm
from core_cpu.ipex.lowering import ipex
from core_cpu.ipex.presence import why_not as why_no_ipex
from core_cpu.memory import read_memory, reset_peak_memory
from core_cpu.passes.gelu import FUSE_TANH_GELU
from core_cpu.peers import PEERS
from core_cpu.probe import product_name
from core_cpu.reading import read_rates
from core_cpu.sleeping import CAN_SLEEP, HostMemory

_NO_COMPILER = "none found; lowering 'inductor' needs one"


@hookimpl
def core_open_device(context: OpenContext) -> DeviceParts:
    """Open the processor. There is one: all cores share one memory."""
    if context.index != 0:
        raise DeviceUnavailableError(
            f"device 'cpu:{context.index}'",
            found="the processor is one device, with index 0",
            remedy="ask for 'cpu'",
        )
    capabilities = Capabilities(
        device_name=product_name(),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
        modes=("compile",),
        # Linears of Llama-1B shapes, 2 threads, merged against separate: 4 to 6 % faster for one token, but 3 to 13 %
        # slower for 16 and 128 tokens in fp32.
        unprofitable={"merge_linears": "batched fp32 products of merged weights are slower on a processor"},
        extra={
            "cxx_compiler": find_cxx_compiler() or _NO_COMPILER,
            "threads": torch.get_num_threads(),
            "kernels": f"none: {lacking}" if (lacking := why_no_kernels()) else identity(),
        },
    )
    # No synchronize, empty_cache or side_stream: the defaults of DeviceParts do nothing, which is right here.
    return DeviceParts(
        torch_device=torch.device("cpu"),
        capabilities=capabilities,
        memory=read_memory,
        reset_peak_memory=reset_peak_memory,
        sleeping_memory=HostMemory if CAN_SLEEP else None,
        places_weights=CAN_SLEEP,
        kernel_compilers=(AOT_INDUCTOR, KERNELS),
        peers=PEERS,
        read_rates=read_rates,
        prepare=prepare,
    )


@hookimpl
def core_register_ops() -> Sequence[OpImplementation]:
    """Implement canonical ops by the plugin's kernels, where these can be built, and by a library's."""
    if why_no_kernels():
        return norm.IMPLEMENTATIONS
    from core_cpu import attention, collectives, linear, lora, quantized, weight_only
    from core_cpu.ops import recurrent

    kernels = (attention, linear, lora, weight_only, quantized, recurrent, collectives, norm)
    return tuple(implementation for module in kernels for implementation in module.IMPLEMENTATIONS)


@hookimpl
def core_register_passes() -> Sequence[Pass]:
    """Rewrite graphs for a processor, and for the plugin's kernels where these can be built."""
    if why_no_kernels():
        return (FUSE_TANH_GELU,)
    from core_cpu import quantized
    from core_cpu.passes.products import LIFT_PRODUCTS

    return (FUSE_TANH_GELU, *quantized.PASSES, LIFT_PRODUCTS)


@hookimpl
def core_lowering(context: DeviceContext) -> Lowerings:
    """Prefer Inductor, whose CPU code needs a C++ compiler; without one, run the graph's own Python and say why."""
    lacking = missing()
    by_rows = frozenset({"inline"})  # each op of torch as a call of its own; compilers choose loops by the sizes
    no_ipex = why_no_ipex() or lacking
    available = {
        **INLINE.available,
        "inductor": refuse("inductor", lacking) if lacking else inductor,
        "ipex": refuse("ipex", no_ipex) if no_ipex else ipex,
    }
    if lacking:
        instead = f"'inductor' can't be used, as {lacking}"
        return replace(INLINE, available=available, instead=instead, batch_invariant=by_rows)
    begins = {"inductor": begin_inductor}
    return replace(
        INLINE, available=available, default="inductor", begins=begins, interim="inline", batch_invariant=by_rows
    )


@hookimpl
def core_graph_backend() -> GraphBackendFactory:
    """Run the compiled program of each bucket: a processor has no graphs to capture."""
    return CallBackend


@hookimpl
def core_register_fakes() -> tuple[FakeOp, ...]:
    """Let models that call ops of `sgl_kernel` or `torch_ipex` be traced, where these libraries are loaded."""
    return (*SGL_KERNEL, *TORCH_IPEX)
