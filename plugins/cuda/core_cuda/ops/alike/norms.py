"""RMSNorm and layer norm with each row's sums in one order, however many rows there are.

The kernels are those of `core_cuda.ops.norm`. There the number of rows decides how many threads share one; here its
width alone. How a row is loaded decides too which of its numbers a thread adds up, and the compiler asks addresses and
strides for that: rows that begin elsewhere than at multiples of 16 bytes are copied first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpCall
from core.common.ops.norm.norms import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from core_cuda.ops.norm.norms import MAX_WIDTH, NormConfig, run_layer_norm, run_rms_norm
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rows import outputs

_MULTIPLE = 16
"""What a row's width has to be a multiple of, as the compiler asks it of strides."""
_ALIGNED = 16


def config_of(width: int) -> NormConfig:
    """Return how rows of this width are shared out: 8 values to a thread, up to 1024 of narrow rows to a program."""
    block = triton.next_power_of_2(width)
    if block > MAX_WIDTH:
        return NormConfig(rows=1, num_warps=16, early=False)
    rows = max(1024 // block, 1)
    num_warps = min(max(rows * block // 256, 1), 16)
    return NormConfig(rows=rows, num_warps=num_warps, early=rows * block <= 512 * num_warps)


def width_condition(call: OpCall) -> str | None:
    """Refuse rows of which one alone would be loaded otherwise than one of several."""
    width = call.args["x"].shape[-1]
    if width % _MULTIPLE == 0:
        return None
    return f"rows have {width} numbers, and those that start at multiples of 16 bytes are multiples of {_MULTIPLE}"


def _alike(op: CanonicalOp, run: Callable[..., Any], **args: Any) -> Any:
    rows = {name: args[name] for name in ("x", "residual") if name in args}
    evenly: dict[str, Tensor] = {
        name: x if _starts_evenly(x) else x.clone(memory_format=torch.contiguous_format) for name, x in rows.items()
    }
    found = run(config=config_of(args["x"].shape[-1]), **{**args, **evenly})
    if all(map(operator.is_, rows.values(), evenly.values())):
        return found
    made = outputs(op, args, args["x"].device)
    for to, result in zip(made, found if isinstance(found, tuple) else (found,), strict=True):
        to.copy_(result)
    return tuple(made) if isinstance(found, tuple) else made[0]


def _starts_evenly(x: Tensor) -> bool:
    """Tell whether rows lie in one run of memory each and begin where the compiler may take several numbers at once."""
    spread = all(stride % _MULTIPLE == 0 for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)
    return x.stride(-1) == 1 and spread and x.data_ptr() % _ALIGNED == 0


rms_norm_alike, add_rms_norm_alike = (
    kernel_of(op, "alike")(partial(_alike, op, partial(run_rms_norm, op))) for op in (RMS_NORM, ADD_RMS_NORM)
)
layer_norm_alike = kernel_of(LAYER_NORM, "alike")(partial(_alike, LAYER_NORM, run_layer_norm))
