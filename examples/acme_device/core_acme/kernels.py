"""Acme's kernels for canonical ops of rows: norms, rotary embedding, gates, quantisation.

On a real device these are calls into the vendor's library. Here they are torch on CPU tensors, and differ from the
references where kernels do: they compute in fp32 whatever the dtype, round once at the end, and order sums and products
in their own way.

Each is a custom op `acme::name`: one node in a graph, and one call on a tape. Schema and fake are those of the
canonical op, whose docstring in `core.common.ops` says what the arguments mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from core.common.ops.declaration import CanonicalOp
from core.common.ops.mlp.activation import ACTIVATIONS, GATED_ACTIVATION, GATED_ACTIVATION_FUSED
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core.common.ops.quantize.symmetric import QUANTIZE, RANGES
from core.common.ops.rotary.rotation import ROTARY
from torch import Tensor

Kernel = Callable[..., "Tensor | tuple[Tensor, ...]"]
Dtype = torch.dtype | None


def kernel_of(
    op: CanonicalOp, namespace: str = "acme", *, keywords: bool = True
) -> Callable[[Kernel], torch._ops.OpOverload]:
    """Return the decorator that registers a kernel as `namespace::name` with the schema and the fake of `op`.

    keywords: whether arguments by keyword alone stay that; torch takes no tensors among them, and the kernel gets all
    arguments by position otherwise.
    """

    def register(kernel: Kernel) -> torch._ops.OpOverload:
        schema = op.schema.removeprefix(op.name)
        schema = schema if keywords else schema.replace("*, ", "")
        name = f"{namespace}::{kernel.__name__}"
        made = torch.library.custom_op(name, kernel, mutates_args=op.mutates, schema=schema)
        made.register_fake(op.fake if keywords else _by_position(op))
        return made._opoverload

    return register


def _by_position(op: CanonicalOp) -> Callable[..., Any]:
    """Return the fake of `op` for a schema without keywords."""
    names = [argument.name for argument in op.overload._schema.arguments]

    def fake(*args: Any) -> Any:
        first = len(op.positional)
        return op.fake(*args[:first], **dict(zip(names[first:], args[first:], strict=False)))

    return fake


@kernel_of(RMS_NORM)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Normalise rows in fp32."""
    return _normed(x, weight, eps, **options)


@kernel_of(ADD_RMS_NORM)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """Add, round the sum to the common dtype, and normalise it."""
    total = x + residual
    return _normed(total, weight, eps, **options), total


def _normed(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    compute_dtype: Dtype = None,
    normed_dtype: Dtype = None,
    weight_dtype: Dtype = None,
    out_dtype: Dtype = None,
) -> Tensor:
    """Normalise rows in fp32; compute_dtype is not read, since what is narrower may be computed wider."""
    wide, size = x.float(), x.shape[-1]
    # sqrt(n) / sqrt(sum + n * eps): the sum need not wait for a division.
    normed = wide * (torch.rsqrt(wide.square().sum(-1, keepdim=True) + size * eps) * math.sqrt(size))
    if normed_dtype is not None:
        normed = normed.to(normed_dtype)
    if weight is not None:
        gain = (weight if weight_dtype is None else weight.to(weight_dtype)).float()
        normed = normed.float() * (gain + offset if offset else gain)
    return normed.to(out_dtype or x.dtype)


@kernel_of(ROTARY)
def rotary(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    rotary_dim: int = 0,
    compute_dtype: Dtype = None,
    out_dtype: Dtype = None,
) -> tuple[Tensor, Tensor]:
    """Rotate in fp32, pair by pair into the result's own memory."""
    width = rotary_dim or query.shape[-1]
    tables = (_of_pairs(cos.float(), width, style), _of_pairs(sin.float(), width, style))
    turned = tuple(_turned(x, tables, width, style, out_dtype or x.dtype) for x in (query, key))
    return turned[0], turned[1]


def _of_pairs(table: Tensor, width: int, style: str) -> tuple[Tensor, Tensor]:
    """Return a table's factors for the first and for the second feature of each pair, as the result lays these out."""
    if table.shape[-1] != width:
        return table, table  # one value per pair
    return _halves(table, alternating=style == "interleaved")


def _halves(x: Tensor, *, alternating: bool) -> tuple[Tensor, Tensor]:
    if alternating:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _turned(
    x: Tensor, tables: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], width: int, style: str, out: torch.dtype
) -> Tensor:
    keeps_order = width == x.shape[-1] and style != "deinterleave"
    result = torch.empty_like(x, dtype=out) if keeps_order else x.new_empty(x.shape, dtype=out)
    a, b = _halves(x[..., :width].float(), alternating=style != "half")
    first, second = _halves(result[..., :width], alternating=style == "interleaved")
    (cos_a, cos_b), (sin_a, sin_b) = tables
    first.copy_(a * cos_a - b * sin_a)
    second.copy_(b * cos_b + a * sin_b)
    if width != x.shape[-1]:
        result[..., width:] = x[..., width:]
    return result


@kernel_of(GATED_ACTIVATION)
def gated_activation(gate: Tensor, up: Tensor, *, kind: str, limit: float = 0.0, up_offset: float = 0.0) -> Tensor:
    """Apply the gate in fp32 and round the product once."""
    return _gated(gate, up, kind, limit, up_offset)


@kernel_of(GATED_ACTIVATION_FUSED)
def gated_activation_fused(
    gate_up: Tensor,
    *,
    kind: str,
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float = 0.0,
    up_offset: float = 0.0,
) -> Tensor:
    """Split gate and up where they lie, and apply the gate."""
    first, second = _halves(gate_up, alternating=interleaved)
    gate, up = (first, second) if gate_first else (second, first)
    return _gated(gate, up, kind, limit, up_offset)


def _gated(gate: Tensor, up: Tensor, kind: str, limit: float, up_offset: float) -> Tensor:
    out, gate, up = torch.promote_types(gate.dtype, up.dtype), gate.float(), up.float()
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (ACTIVATIONS[kind](gate) * (up + up_offset if up_offset else up)).to(out)


@kernel_of(QUANTIZE)
def quantize(
    x: Tensor, scale: Tensor | None, *, dtype: torch.dtype, granularity: str = "token", group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """Quantise by the reciprocal of the scale: a product per value instead of a division."""
    low, high = RANGES[dtype]
    regions = x.float().unflatten(-1, (-1, group_size)) if granularity == "group" else x.float()
    used = _scale(regions, granularity, high) if scale is None else _own(scale)
    inverse = used.reciprocal()
    codes = (regions * (inverse[..., None] if granularity == "group" else inverse)).clamp_(low, high).view(x.shape)
    codes = codes.round_() if dtype == torch.int8 else codes
    return codes.to(dtype).contiguous(), used


def _scale(regions: Tensor, granularity: str, high: float) -> Tensor:
    magnitude = regions.abs()
    if granularity == "tensor":
        largest = magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    else:
        largest = magnitude.amax(-1, keepdim=granularity == "token")
    # Never zero: rows of zeros have codes of zero.
    return largest.contiguous().div(high).clamp_(min=torch.finfo(torch.float32).tiny)


def _own(scale: Tensor) -> Tensor:
    return scale.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
