"""Rotary position embedding of the rows that an attention kernel reads, their norm before it included.

It follows `core::rotary` and `core::qk_norm_rotary` (Su et al., arXiv 2104.09864; Zhang and Sennrich, arXiv
1910.07467), computes in fp32 and rounds where these say.
"""

# Triton reads annotations as types of its own.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.common.ops.implementation import OpCall
from core_cuda.ops.conditions import DTYPES
from core_cuda.ops.rows import TYPES

_WEIGHTS = ("query_weight", "key_weight")


class Rotation(NamedTuple):
    """What a kernel is compiled for."""

    style: str = "half"
    #: rotated features; 0 if there is nothing to do at all
    size: int = 0
    #: whether the tables have one value per pair
    per_pair: bool = False
    #: the dtype that tables are rounded to
    table: Any = tl.float32
    normalize: bool = False
    #: whether the norm has a weight
    weighted: bool = False
    #: the dtype that normed rows are rounded to; None where they are not
    normed: Any = None
    #: the dtype that the weight is rounded to; None where there is none
    weight: Any = None


@dataclass(frozen=True, slots=True)
class Turning:
    """How a call of `core::rotary_attention` norms and rotates query and key, by the names of its schema."""

    cos: Tensor
    sin: Tensor
    query_weight: Tensor | None
    key_weight: Tensor | None
    eps: float
    offset: float
    rotation: Rotation


def take_turning(args: dict[str, Any]) -> Turning:
    """Split the norm's and the rotation's arguments from those of `core::rotary_attention`; attention's remain."""
    cos, sin, weight, key_weight = (_dense(args.pop(name)) for name in ("cos", "sin", *_WEIGHTS))
    size = args.pop("rotary_dim") or args["query"].shape[2]
    normed, weight_dtype, compute = (args.pop(n) for n in ("normed_dtype", "weight_dtype", "compute_dtype"))
    del args["norm_compute_dtype"], args["out_dtype"]  # `why_not` allows only one of each
    rotation = Rotation(
        style=args.pop("style"),
        size=size,
        per_pair=cos.shape[-1] != size,
        table=TYPES[compute or cos.dtype],
        normalize=args.pop("normalize"),
        weighted=weight is not None,
        normed=TYPES.get(normed),
        weight=None if weight is None else TYPES[weight_dtype or weight.dtype],
    )
    return Turning(cos, sin, weight, key_weight, args.pop("eps"), args.pop("offset"), rotation)


def _dense(x: Tensor | None) -> Any:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def why_not(call: OpCall) -> str | None:
    """Return why kernels cannot rotate query and key as a call of `core::rotary_attention` asks, or None."""
    args = call.args
    dtype, kinds = args["query"].dtype, {None if args[n] is None else args[n].dtype for n in _WEIGHTS}
    for name in ("cos", "sin", *_WEIGHTS):
        if args[name] is not None and args[name].dtype not in DTYPES:
            return f"{name} is {args[name].dtype}, and the kernel computes in torch.float32"
    if len(kinds) > 1:
        return "query_weight and key_weight differ in dtype, or only one is given"
    for name in ("normed_dtype", "weight_dtype"):
        if args[name] is not None and args[name] not in DTYPES:
            return f"{name} is {args[name]}, and the kernel computes in torch.float32"
    allowed = {"norm_compute_dtype": (torch.float32,), "compute_dtype": (torch.float32, dtype), "out_dtype": (dtype,)}
    for name, dtypes in allowed.items():
        if args[name] is not None and args[name] not in dtypes:
            return f"{name} is {args[name]} for a query of {dtype}, and the kernel takes {', '.join(map(str, dtypes))}"
    return None


@triton.jit
def _sources(d, ROTATION: tl.constexpr):
    """Return for each feature of the result its own source, its pair's other one, the latter's sign, and its angle."""
    HALF: tl.constexpr = ROTATION.size // 2
    if ROTATION.style == "interleaved":
        own, other, is_first, pair = d, d ^ 1, d % 2 == 0, d // 2
    else:
        is_first = d < HALF
        pair = tl.where(is_first, d, d - HALF)
        if ROTATION.style == "half":
            own, other = d, tl.where(is_first, d + HALF, d - HALF)
        else:
            own = tl.where(is_first, 2 * pair, 2 * pair + 1)
            other = tl.where(is_first, 2 * pair + 1, 2 * pair)
    turned = d < ROTATION.size
    angle = pair if ROTATION.per_pair else d
    return tl.where(turned, own, d), tl.where(turned, other, d), tl.where(is_first, -1.0, 1.0), angle


@triton.jit
def _normed(x, scale, weight, columns, mask, offset, ROTATION: tl.constexpr, DTYPE: tl.constexpr):
    x = x * scale
    if ROTATION.normed is not None:
        x = x.to(ROTATION.normed).to(tl.float32)
    if ROTATION.weighted:
        factor = tl.load(weight + columns, mask=mask, other=0.0).to(ROTATION.weight).to(tl.float32)
        x = x * (factor + offset).to(ROTATION.weight).to(tl.float32)[None, :]
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def rotated_rows(x_rows, live, cos_rows, sin_rows, weight, eps, offset, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 ROTATION: tl.constexpr):  # fmt: skip
    """Return the rows at the pointers x_rows (M,), normed if asked and rotated, as a tile (M, BLOCK_D) in their dtype.

    live (M,): which rows exist; the others are zero. cos_rows, sin_rows: pointers (M,) to the rows of the tables.
    """
    d = tl.arange(0, BLOCK_D)
    own, other, sign, angle = _sources(d, ROTATION)
    mask = live[:, None] & (d < D)[None, :]
    raw = tl.load(x_rows[:, None] + own[None, :], mask=mask, other=0.0)
    x = raw.to(tl.float32)
    crossed = tl.load(x_rows[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTATION.normalize:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = _normed(x, scale, weight, own, d < D, offset, ROTATION, raw.dtype)
        crossed = _normed(crossed, scale, weight, other, d < D, offset, ROTATION, raw.dtype)
    turned = live[:, None] & (d < ROTATION.size)[None, :]
    cos = tl.load(cos_rows[:, None] + angle[None, :], mask=turned, other=1.0)
    sin = tl.load(sin_rows[:, None] + angle[None, :], mask=turned, other=0.0)
    cos, sin = cos.to(ROTATION.table).to(tl.float32), sin.to(ROTATION.table).to(tl.float32)
    return (x * cos + crossed * sign[None, :] * sin).to(raw.dtype)
