"""Norms over the last dimension, optionally of a sum, and optionally quantised to fp8 or int8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from core.common.ops.declaration import CanonicalOp
from core.common.ops.norm.norms import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from core.common.ops.norm.quantized import ADD_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE
from core_cuda.ops import launching
from core_cuda.ops.norm.kernel import long_norm_kernel, norm_kernel
from core_cuda.ops.quantize import Codes
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rows import TYPES, as_rows, outputs

Dtype = torch.dtype | None

MAX_WIDTH = 32768
"""The longest row that a program holds in registers."""

_LONG_BLOCK = 8192
_FEW_REGISTERS = 16  # values of a row to a thread, up to which the weight has room beside them


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    """How rows are shared out among programs."""

    #: rows that a program takes
    rows: int
    num_warps: int
    #: whether the weight is read with the rows, not after them
    early: bool


def default_config(num_rows: int, width: int) -> NormConfig:
    """Return how rows of this width are shared out: 16 values to a thread, several narrow rows to a program.

    Few rows are spread over as many programs as there are multiprocessors, and over twice as many threads, since then
    only latency counts.
    """
    block = triton.next_power_of_2(width)
    if block > MAX_WIDTH:
        return NormConfig(rows=1, num_warps=16, early=False)
    spread = max(num_rows // launching.num_multiprocessors(), 1)
    rows = min(max(1024 // block, 1), 1 << (spread.bit_length() - 1))
    per_thread = 8 if num_rows <= launching.num_multiprocessors() else 16
    num_warps = min(max(rows * block // (32 * per_thread), 1), 16)
    return NormConfig(rows=rows, num_warps=num_warps, early=rows * block <= _FEW_REGISTERS * 32 * num_warps)


def candidates(num_rows: int, width: int) -> Iterator[NormConfig]:
    """Yield the configurations worth measuring for rows of this width."""
    block = triton.next_power_of_2(width)
    if block > MAX_WIDTH:
        yield from (NormConfig(rows=1, num_warps=num_warps, early=False) for num_warps in (8, 16, 32))
        return
    for rows in (1, 2, 4, 8, 16):
        for num_warps in (1, 2, 4, 8, 16, 32):
            per_thread = rows * block // (32 * num_warps)
            if rows <= num_rows and 4 <= per_thread <= 64:
                yield NormConfig(rows=rows, num_warps=num_warps, early=per_thread <= _FEW_REGISTERS)


def run_norm(
    reads: Mapping[str, Tensor | None],
    writes: Mapping[str, Tensor | None],
    options: Mapping[str, Any],
    *,
    codes: Codes | None = None,
    config: NormConfig | None = None,
) -> None:
    """Launch the kernel of a norm.

    reads: x and residual (..., D). writes: out, with a residual total (..., D). All are named, and None where absent.
    options: weight and bias (D,), eps, OFFSET, CENTER and the dtypes of the kernel. codes: None where out is what the
    op stores; rows over `MAX_WIDTH` end in no codes.
    """
    codes = codes or Codes()
    rows = as_rows(reads, {**writes, "scale": codes.made})
    width = rows.arguments["x"].shape[-1]
    block = triton.next_power_of_2(width)
    config = config or default_config(rows.count, width)
    arguments = {**rows.arguments, **options, "WIDTH": width, "num_warps": config.num_warps}
    if block > MAX_WIDTH:
        del arguments["scale"], arguments["scale_outer"], arguments["scale_inner"]
        launching.launch(long_norm_kernel, (rows.count,), **arguments, BLOCK=_LONG_BLOCK)
    else:
        arguments |= {"BLOCK": block, "ROWS": config.rows, "EARLY": config.early, **codes.arguments}
        launching.launch(norm_kernel, (triton.cdiv(rows.count, config.rows),), **arguments)
    rows.flush()


def options_of(weight: Tensor | None, eps: float, offset: float, x: Dtype, dtypes: Sequence[Dtype]) -> dict[str, Any]:
    """Return the kernel's options for an RMSNorm of rows of x's dtype. dtypes: normed_dtype, weight_dtype,
    out_dtype."""
    normed, factor, out = dtypes
    normed = normed or torch.float32
    factor = factor or (torch.float32 if weight is None else weight.dtype)
    product = torch.promote_types(normed, factor)
    types = zip(("NORMED", "FACTOR", "PRODUCT", "STORED"), (normed, factor, product, out or x), strict=True)
    return {
        "weight": None if weight is None else weight.contiguous(),
        "bias": None,
        "eps": eps,
        "OFFSET": offset,
        "CENTER": False,
        **{name: TYPES[dtype] for name, dtype in types if dtype is not None},
    }


def run_rms_norm(op: CanonicalOp, config: NormConfig | None = None, **args: Any) -> Any:
    """Do what an op does that is an RMSNorm, of a sum or not, ending in codes or not; each element is read once.

    compute_dtype is not read: `computes_in_fp32` leaves those that are no wider than fp32, in which kernels compute.
    """
    x, residual = args["x"], args.get("residual")
    made = outputs(op, args, x.device)
    reads, writes = {"x": x, "residual": residual}, {"out": made[0], "total": None if residual is None else made[-1]}
    summed = x.dtype if residual is None else made[-1].dtype
    dtypes = [args[name] for name in ("normed_dtype", "weight_dtype", "out_dtype")]
    options = options_of(args["weight"], args["eps"], args["offset"], summed, dtypes)
    if "scale" in args:
        _norm_codes(reads, writes, options, Codes(args["scale"], made[1], args["group_size"]), dtypes[-1] or summed)
    else:
        run_norm(reads, writes, options, config=config)
    return made[0] if len(made) == 1 else tuple(made)


rms_norm, add_rms_norm, rms_norm_quantize, add_rms_norm_quantize = (
    kernel_of(op)(partial(run_rms_norm, op))
    for op in (RMS_NORM, ADD_RMS_NORM, RMS_NORM_QUANTIZE, ADD_RMS_NORM_QUANTIZE)
)


def run_layer_norm(
    x: Tensor,
    bias: Tensor | None,
    compute_dtype: Dtype,
    out_dtype: Dtype,
    config: NormConfig | None = None,
    **args: Any,
) -> Tensor:
    """Subtract the mean before squares are summed, so that a common shift of all values costs no digits."""
    rounding = {"compute_dtype": compute_dtype, "out_dtype": out_dtype}
    (out,) = outputs(LAYER_NORM, {"x": x, "bias": bias, **rounding, **args}, x.device)
    options = options_of(args["weight"], args["eps"], 0.0, x.dtype, (None, compute_dtype or torch.float32, out_dtype))
    options |= {"bias": None if bias is None else bias.contiguous(), "CENTER": True}
    run_norm({"x": x, "residual": None}, {"out": out, "total": None}, options, config=config)
    return out


layer_norm = kernel_of(LAYER_NORM)(run_layer_norm)


def _norm_codes(
    reads: Mapping[str, Tensor | None],
    writes: Mapping[str, Tensor | None],
    options: Mapping[str, Any],
    ends: Codes,
    stored: torch.dtype,
) -> None:
    """Write the codes of a norm to `out`. stored: what the norm rounds to before they are made."""
    codes, total = writes["out"], writes["total"]
    assert codes is not None
    if triton.next_power_of_2(codes.shape[-1]) <= MAX_WIDTH:
        run_norm(reads, writes, options, codes=ends)
        ends.fill(codes)
        return
    normed = torch.empty_like(codes, dtype=stored)
    run_norm(reads, {"out": normed, "total": total}, options)
    ends.quantize(normed, codes)
