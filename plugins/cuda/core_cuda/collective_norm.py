"""`core::all_reduce_add_rms_norm` and `core::all_reduce_rms_norm` where GPUs share memory: in one kernel, or in two
that overlap."""

from __future__ import annotations

from functools import partial
from typing import Any

from core.common.ops.collective import ALL_REDUCE_ADD_RMS_NORM, ALL_REDUCE_RMS_NORM
from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpCall, OpImplementation
from core_cuda.collective import all_reduce, by_kernel, why_not
from core_cuda.ops.conditions import all_of, computes_in_fp32, dtypes
from core_cuda.ops.norm import norms
from core_cuda.ops.registration import OP_OF, kernel_of
from core_cuda.ops.rows import outputs
from core_cuda.ops.summing import MAX_ROW_BYTES, launch_sum

FUSED_BYTES = 2**20
"""Of x, from which one kernel is faster than two: below, the sum's threads are too few to normalise a row quickly."""


def _short(call: OpCall) -> str | None:
    """Refuse rows that a program can't hold in registers."""
    x = call.args["x"]
    width, most = x.shape[-1], MAX_ROW_BYTES // x.element_size()
    if isinstance(width, int) and width <= most:
        return None
    return f"rows have {width} elements of {x.dtype}, and the kernel takes {most} at most"


def _sum_and_norm(op: CanonicalOp, group: str, **args: Any) -> Any:
    """Do what an op does that is an RMSNorm of a sum over GPUs; in the kernels of its two parts what is small, or too
    large."""
    x, residual = args["x"], args.get("residual")
    way = by_kernel(x, group, x.shape[-1]) if x.numel() * x.element_size() >= FUSED_BYTES else None
    if way is None:
        norm = norms.rms_norm if residual is None else norms.add_rms_norm
        return norm(**{**args, "x": all_reduce(x, group)})
    made = outputs(op, {**args, "group": group}, x.device)
    assert all(each.is_contiguous() for each in made)  # as is what the reduction gives
    summed = x.dtype if residual is None else made[-1].dtype
    rounding = [args[name] for name in ("normed_dtype", "weight_dtype", "out_dtype")]
    launch_sum(
        *way,
        x.contiguous(),
        made[0],
        residual=None if residual is None else residual.contiguous(),
        total=None if residual is None else made[1],
        norm=norms.options_of(args["weight"], args["eps"], args["offset"], summed, rounding),
    )
    return made[0] if residual is None else tuple(made)


all_reduce_rms_norm, all_reduce_add_rms_norm = (
    kernel_of(op)(partial(_sum_and_norm, op)) for op in (ALL_REDUCE_RMS_NORM, ALL_REDUCE_ADD_RMS_NORM)
)

_CONDITIONS = {
    all_reduce_rms_norm: all_of(dtypes, computes_in_fp32("x"), _short, why_not),
    all_reduce_add_rms_norm: all_of(dtypes, computes_in_fp32("x", "residual"), _short, why_not),
}

IMPLEMENTATIONS = tuple(
    OpImplementation(op=OP_OF[kernel], name=f"cuda_{kernel._opname}", fn=kernel, condition=condition)
    for kernel, condition in _CONDITIONS.items()
)
