"""The canonical ops that Acme's kernels implement, each with the calls it takes; all others stay what models wrote."""

from __future__ import annotations

from collections.abc import Callable

import torch
from core.common.ops.implementation import OpCall, OpImplementation
from torch import Tensor

from core_acme import attention, kernels, recurrent

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels read and write; they compute in fp32."""

_CODES = (torch.int8, torch.float8_e4m3fn)
_FORMAT = "dtype"  # the argument of `quantize` that names the format of codes


def refused_dtype(call: OpCall) -> str | None:
    """Return why the kernels cannot take a call for its dtypes, or None."""
    for name, value in call.args.items():
        dtype = value.dtype if isinstance(value, Tensor) else value
        if not isinstance(dtype, torch.dtype) or name == _FORMAT:
            continue
        if dtype.is_floating_point and dtype not in DTYPES:
            return f"{name} is {dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    return None


def rows(*tensors: str) -> Callable[[OpCall], str | None]:
    """Return the condition of a kernel over rows; it computes in fp32, or wider than the dtype of these tensors."""

    def condition(call: OpCall) -> str | None:
        compute = call.args.get("compute_dtype")
        # What comes in a narrow dtype loses nothing more when it is cast to it; what comes wider would.
        if compute not in (None, torch.float32) and any(call.args[name].dtype != compute for name in tensors):
            return f"compute_dtype is {compute}, and the kernel computes in torch.float32"
        return refused_dtype(call)

    return condition


def pages(call: OpCall) -> str | None:
    """Be the condition of attention: no mask, and caches of values, not of codes, that are one run of memory."""
    if call.args["mask"] is not None:
        return "it has a mask, and the kernel takes none"
    for name in ("key_cache", "value_cache"):
        if call.args[name].dtype == torch.float8_e4m3fn:
            return f"{name} holds codes, and the kernel reads values"
        if not call.args[name].is_contiguous():
            return f"{name} is not contiguous, and the kernel reads whole pages"
    return refused_dtype(call)


def codes(call: OpCall) -> str | None:
    """Be the condition of quantisation: the formats of code that the device has."""
    if call.args[_FORMAT] not in _CODES:
        return f"codes of {call.args[_FORMAT]} are none that the device has"
    return refused_dtype(call)


IMPLEMENTATIONS = (
    OpImplementation(op="core::rms_norm", name="acme_rms_norm", fn=kernels.rms_norm, condition=rows("x")),
    OpImplementation(
        op="core::add_rms_norm",
        name="acme_add_rms_norm",
        fn=kernels.add_rms_norm,
        condition=rows("x", "residual"),
    ),
    OpImplementation(
        op="core::rotary",
        name="acme_rotary",
        fn=kernels.rotary,
        condition=rows("query", "key", "cos", "sin"),
    ),
    OpImplementation(
        op="core::gated_activation", name="acme_gated_activation", fn=kernels.gated_activation, condition=refused_dtype
    ),
    OpImplementation(
        op="core::gated_activation_fused",
        name="acme_gated_activation_fused",
        fn=kernels.gated_activation_fused,
        condition=refused_dtype,
    ),
    OpImplementation(op="core::attention", name="acme_attention", fn=attention.attention, condition=pages),
    OpImplementation(op="core::quantize", name="acme_quantize", fn=kernels.quantize, condition=codes),
    OpImplementation(
        op="core::causal_conv1d_update",
        name="acme_causal_conv1d_update",
        fn=recurrent.causal_conv1d_update,
        condition=refused_dtype,
    ),
    OpImplementation(
        op="core::selective_state_update",
        name="acme_selective_state_update",
        fn=recurrent.selective_state_update,
        condition=refused_dtype,
    ),
)
