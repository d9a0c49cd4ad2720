"""The gate of a gated MLP, `act(gate) * up`, from two tensors or from one, optionally followed by quantisation to fp8
or int8."""

# Triton reads annotations of kernels as types of its own

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.declaration import CanonicalOp
from core.common.ops.mlp.activation import GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.mlp.quantized import GATED_ACTIVATION_QUANTIZE
from core_cuda.ops import launching
from core_cuda.ops.launching import start_next, wait_for_inputs
from core_cuda.ops.quantize import Codes, largest, scale_of, to_codes
from core_cuda.ops.registration import kernel_of
from core_cuda.ops.rows import TYPES, as_rows, outputs, row_starts

MAX_ROW = 32768
"""The longest row for which one program computes a scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """How rows are shared out among programs."""

    #: columns of one row that a program takes
    block: int
    num_warps: int


def default_config(num_rows: int, width: int, *, region: int = 0) -> GateConfig:
    """Return how rows of this width are shared out: small blocks where few rows leave multiprocessors idle.

    region: how many columns share a scale, all of which one program must see; 0 for none.
    """
    if region == width:
        block = triton.next_power_of_2(width)
        return GateConfig(block=block, num_warps=min(max(block // 512, 1), 32))
    many = num_rows * width >= 4096 * launching.num_multiprocessors()
    block = max(min(2048 if many else 512, max(triton.next_power_of_2(width), 32)), region)
    # 16 bytes of half precision to a thread and load; two loads each of gate and up where there is enough to do.
    return GateConfig(block=block, num_warps=min(max(block // (512 if many else 256), 1), 4 if block <= 2048 else 16))


def candidates(num_rows: int, width: int, *, whole_rows: bool = False) -> Iterator[GateConfig]:
    """Yield the configurations worth measuring for rows of this width."""
    whole = triton.next_power_of_2(width)
    for block in (whole,) if whole_rows else (256, 512, 1024, 2048, 4096):
        for num_warps in (1, 2, 4, 8, 16, 32):
            if block <= max(whole, 256) and 4 <= block // (32 * num_warps) <= 64:
                yield GateConfig(block=block, num_warps=num_warps)


@triton.jit
def activate(x, KIND: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    """Return the activation of fp32 x, fp32; kinds that eager code writes out round each step to DTYPE."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u), without the cancellation.
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "gelu_new":
        cube = (x * x * x).to(DTYPE).to(tl.float32)
        inner = (x + (0.044715 * cube).to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
        inner = (0.7978845608028654 * inner).to(DTYPE).to(tl.float32)
        tanh = (2.0 * tl.sigmoid(2.0 * inner) - 1.0).to(DTYPE).to(tl.float32)
        y = (0.5 * x).to(DTYPE).to(tl.float32) * (1.0 + tanh).to(DTYPE).to(tl.float32)
    elif KIND == "quick_gelu":
        y = x * tl.sigmoid((1.702 * x).to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
    elif KIND == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif KIND == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        y = positive * positive
    else:
        tl.static_assert(KIND == "sigmoid", "an activation that core::gated_activation does not have")
        y = tl.sigmoid(x)
    return y.to(DTYPE).to(tl.float32)


@triton.jit
def gate_product(gate, up, limit, KIND: tl.constexpr, LIMITED: tl.constexpr, UP_OFFSET: tl.constexpr):
    """Return act(gate) * (up + UP_OFFSET) of tensors in their own dtypes, fp32, before the product is rounded."""
    GATE: tl.constexpr = gate.dtype
    UP: tl.constexpr = up.dtype
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    if LIMITED:
        # Comparisons, because NaN has to stay.
        gate = tl.where(gate > limit, limit, gate).to(GATE).to(tl.float32)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)).to(UP).to(tl.float32)
    if UP_OFFSET != 0.0:
        up = (up + UP_OFFSET).to(UP).to(tl.float32)
    return activate(gate, KIND, GATE) * up


@triton.jit
def _gate_kernel(
    gate, up, out, scale, given, num_rows, inner, gate_outer, gate_inner, up_outer, up_inner, out_outer, out_inner,
    scale_outer, scale_inner, limit, KIND: tl.constexpr, LIMITED: tl.constexpr, UP_OFFSET: tl.constexpr,
    STORED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATE_FIRST: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row of WIDTH. INTERLEAVED: gate and up alternate in `gate`, and up is not read.

    out: the product, rounded to STORED, or its codes, if there is a scale: `given` () and copied to `scale` (), or made
    and stored in `scale`: of the row, which then is one block, (rows, 1), or of GROUP neighbours, a power of two that
    divides WIDTH and BLOCK, (rows, WIDTH / GROUP).
    """
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_row = gate + row_starts(row, inner, gate_outer, gate_inner, FLAT)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    if INTERLEAVED:
        pairs = (tl.program_id(0) % blocks) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate_row + pairs, mask=pairs < 2 * WIDTH, other=0.0).reshape(BLOCK, 2)
        first, second = tl.split(both)
    else:
        first = tl.load(gate_row + columns, mask=mask, other=0.0)
        second = tl.load(up + row_starts(row, inner, up_outer, up_inner, FLAT) + columns, mask=mask, other=0.0)
    if INTERLEAVED and not GATE_FIRST:
        result = gate_product(second, first, limit, KIND, LIMITED, UP_OFFSET)
    else:
        result = gate_product(first, second, limit, KIND, LIMITED, UP_OFFSET)
    result = result.to(STORED).to(tl.float32)
    if given is not None:
        whole = tl.load(given).to(tl.float32)
        tl.store(scale, whole, mask=tl.program_id(0) == 0)
        result = to_codes(result, whole, out.dtype.element_ty)
    elif GROUP > 0:
        groups = (tl.program_id(0) % blocks) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        result = tl.reshape(tl.where(mask, result, 0.0), (BLOCK // GROUP, GROUP))
        each = scale_of(largest(result), out.dtype.element_ty)
        scale_row = scale + row_starts(row, inner, scale_outer, scale_inner, FLAT)
        tl.store(scale_row + groups, each, mask=groups < WIDTH // GROUP)
        result = tl.reshape(to_codes(result, each[:, None], out.dtype.element_ty), (BLOCK,))
    elif scale is not None:
        used = scale_of(largest(tl.where(mask, result, 0.0), 0), out.dtype.element_ty)
        tl.store(scale + row_starts(row, inner, scale_outer, scale_inner, FLAT), used)
        result = to_codes(result, used, out.dtype.element_ty)
    tl.store(out + row_starts(row, inner, out_outer, out_inner, FLAT) + columns, result, mask=mask)


@dataclass(frozen=True, slots=True)
class Gate:
    """The non-tensor arguments of `core::gated_activation`."""

    kind: str
    gate_first: bool = True
    limit: float = 0.0
    up_offset: float = 0.0
    interleaved: bool = False


def _gated(op: CanonicalOp, **args: Any) -> Any:
    """Do what an op does that gates two tensors, or the parts of one where they lie, ending in codes or not.

    Codes cost no launch more, except where a region over `MAX_ROW` needs a scale.
    """
    gate: Tensor = args["gate_up"] if "gate_up" in args else args["gate"]
    up: Tensor | None = args.get("up")
    options = Gate(
        args["kind"], args.get("gate_first", True), args["limit"], args["up_offset"], args.get("interleaved", False)
    )
    out, *used = outputs(op, args, gate.device)
    parts: tuple[Tensor, Tensor | None] = _parts(gate, options) if up is None else (gate, up)
    if not used:
        run_gate(*parts, out, options)
        return out
    ends = Codes(args["scale"], used[0], args["group_size"])
    if ends.given is not None or (ends.group or out.shape[-1]) <= MAX_ROW:
        run_gate(*parts, out, options, codes=ends)
        ends.fill(out)
    else:
        product = torch.empty_like(out, dtype=gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype))
        run_gate(*parts, product, options)
        ends.quantize(product, out)
    return out, used[0]


gated_activation, gated_activation_fused, gated_activation_quantize = (
    kernel_of(op)(partial(_gated, op)) for op in (GATED_ACTIVATION, GATED_ACTIVATION_FUSED, GATED_ACTIVATION_QUANTIZE)
)


def _parts(gate_up: Tensor, gate: Gate) -> tuple[Tensor, Tensor | None]:
    """Return the tensors that the kernel reads as gate and as up."""
    if gate.interleaved:
        return gate_up, None
    first, second = gate_up.chunk(2, dim=-1)
    return (first, second) if gate.gate_first else (second, first)


def run_gate(
    gate: Tensor,
    up: Tensor | None,
    out: Tensor,
    options: Gate,
    *,
    codes: Codes | None = None,
    config: GateConfig | None = None,
) -> None:
    """Launch the kernel; `out` (..., I) takes the product, or its codes if there are any, as `_gate_kernel` says."""
    codes = codes or Codes()
    width = out.shape[-1]
    rows = as_rows({"gate": gate, "up": up}, {"out": out, "scale": codes.made})
    config = config or default_config(rows.count, width, region=0 if codes.made is None else codes.group or width)
    stored = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    arguments: dict[str, Any] = {
        "limit": options.limit,
        "KIND": options.kind,
        "LIMITED": options.limit > 0,
        "UP_OFFSET": options.up_offset,
        "STORED": TYPES[stored],
        "WIDTH": width,
        "BLOCK": config.block,
        "INTERLEAVED": options.interleaved,
        "GATE_FIRST": options.gate_first,
        **codes.arguments,
    }
    grid = (rows.count * triton.cdiv(width, config.block),)
    launching.launch(_gate_kernel, grid, **{**rows.arguments, **arguments}, num_warps=config.num_warps)
    rows.flush()
