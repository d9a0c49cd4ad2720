"""What the tests of ops on an NPU share: the device, calls moved to it, and each implementation judged on its calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import npu_calls
import pytest
import torch
from torch import Tensor

from core.common.ops.canonical import OPS
from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpImplementation
from core_npu.implementations import IMPLEMENTATIONS
from tests.kernel_cases import CPU

Call = dict[str, Any]

BY_NAME = {op.name: op for op in OPS}
ALONE = tuple(each for each in IMPLEMENTATIONS if not BY_NAME[each.op.removeprefix("core::")].is_collective)
"""The implementations of ops that one process computes by itself."""

MADE: Mapping[str, Callable[[torch.dtype], Iterable[Call]]] = {
    "add_rms_norm_quantize": npu_calls.coded_norms,
    "attention": lambda dtype: (npu_calls.attention_call(dtype, **lens) for lens in npu_calls.LENGTHS.values()),
    "gated_activation": npu_calls.halves,
    "gated_activation_fused": npu_calls.gates,
    "gated_activation_quantize": npu_calls.coded_gates,
    "grouped_mlp": npu_calls.experts,
    "moe_route": npu_calls.routes,
    "rotary": npu_calls.rotary_calls,
    "rotary_attention": lambda dtype: (call for _, call in npu_calls.rotary_attention_calls(dtype)),
    "weight_only_linear": npu_calls.code_linears,
}
"""Op -> calls that reach what its own samples leave out."""


def npu() -> torch.device:
    """Return the first NPU, real or simulated; skip the test where there is none, with the reason."""
    if find_spec("torch_npu") is None:
        pytest.skip("needs torch_npu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch_npu's own modules
        try:
            import torch_npu
        except (ImportError, OSError, RuntimeError) as error:
            pytest.skip(f"needs an ACL runtime: torch_npu cannot be imported ({str(error).splitlines()[0]})")
        if not torch_npu.npu.is_available():
            pytest.skip("needs an NPU, or the simulated ACL runtime (plugins/npu/simulator/launch.py)")
    return torch.device("npu", 0)


def moved(call: Call, device: torch.device) -> Call:
    """Put the tensors of a call on a device, strides and shared memory as they are."""
    memories: dict[int, Tensor] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device == device:
            return value
        storage = value.untyped_storage()
        if storage._cdata not in memories:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            memories[storage._cdata] = whole.view(value.dtype).to(device)
        return memories[storage._cdata].as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: move(value) for name, value in call.items()}


def implementation(op: CanonicalOp) -> OpImplementation:
    """Return the plugin's implementation of an op."""
    (found,) = (each for each in IMPLEMENTATIONS if each.op == op.qualified_name)
    return found


def reason(op: CanonicalOp, call: Call) -> str | None:
    """Return why the plugin's implementation refuses a call, or None."""
    return implementation(op).condition(op.bind((), call))


def taken(op: CanonicalOp, calls: Iterable[Call]) -> list[Call]:
    """Return the calls that the implementation takes, of which there must be some."""
    found = [call for call in calls if reason(op, call) is None]
    assert found, f"the implementation of {op.name} takes none of the calls"
    return found


def on_device(op: CanonicalOp, device: torch.device) -> Callable[..., Any]:
    """Return the implementation as a function of tensors of the host, whose results lie on the device."""
    function = implementation(op).fn
    return lambda **call: function(**moved(call, device))


def own_calls(op: CanonicalOp, dtype: torch.dtype) -> list[Call]:
    """Return the calls of the op's own samples, and those made for the plugin's kernels."""
    return [*sampled(op, dtype), *MADE.get(op.name, lambda dtype: ())(dtype)]


def sampled(op: CanonicalOp, dtype: torch.dtype) -> list[Call]:
    """Return the calls of the op's own samples."""
    return [dict(sample.kwargs) for sample in op.samples(dtype, CPU)]


def copied(call: Call) -> Call:
    """Return the call with tensors of its own."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}


def widened(call: Call) -> Call:
    """Return the call with floating-point tensors in fp64, of its own."""
    floats = {n: v for n, v in call.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return {**call, **{name: value.double() for name, value in floats.items()}}
