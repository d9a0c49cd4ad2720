"""How products with weights of codes are launched for few rows at compute capability 9, and which the kernel takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from core_cuda.ops import launching
from core_cuda.ops.linear.coded_configs import CodedShape
from core_cuda.ops.linear.hopper import described, is_aligned
from core_cuda.ops.linear.hopper_coded_kernel import Pointers, Sizes, Spec, hopper_coded_kernel
from core_cuda.ops.linear.hopper_shares import COLUMNS
from core_cuda.ops.workspace import counters

MAX_ROWS = 16
"""Rows up to which the units that read registers keep up with memory: each warp reads all of x."""
LEAST_SUB = 64
"""Neighbours along K that one scale has to have at least: what four threads hold of two rows of a tile."""
_PER_MULTIPROCESSOR = 2
"""Programs: what one of them waits for, another one computes meanwhile."""
_MOST_STAGES, _MOST_SPLITS = 12, 8
_LEFT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class HopperCodedConfig:
    """How the kernel is compiled and launched: codes of a row in a tile, and programs that share a tile's K."""

    block_k: int
    split_k: int = 1


def why_not(shape: CodedShape) -> str | None:
    """Return why the kernel cannot take a product of these sizes, or None."""
    if shape.group < shape.depth and shape.group & -shape.group < LEAST_SUB:
        return f"groups of {shape.group} codes are no multiples of {LEAST_SUB}"
    if shape.depth % 32:
        return f"rows of {shape.depth} codes do not begin where descriptors can load them"
    return None


def default_config(shape: CodedShape) -> HopperCodedConfig:
    """Return a configuration: deep tiles where registers hold them, and K shared where that takes fewest steps.

    Adding the sums of one more program takes 0.7 of a step, by times measured on an H100.
    """
    block_k = 512 if shape.bits == 4 and shape.rows <= 8 else 256
    tiles, steps = triton.cdiv(shape.columns, COLUMNS), triton.cdiv(shape.depth, block_k)
    slots = _PER_MULTIPROCESSOR * launching.num_multiprocessors()

    def cost(split: int) -> float:
        return float(triton.cdiv(steps, split) * triton.cdiv(tiles * split, slots) + 0.7 * (split - 1))

    return HopperCodedConfig(block_k, min(range(1, max(1, min(_MOST_SPLITS, slots // tiles, steps)) + 1), key=cost))


def takes(x: Tensor, codes: Tensor) -> bool:
    """Tell whether descriptors can load x (M, K) and codes (N, ...), whose rows lie in one run of memory each."""
    return all(each.stride(1) == 1 and is_aligned(each) for each in (x, codes))


def hopper_coded_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    *,
    bits: int,
    config: HopperCodedConfig | None = None,
) -> Tensor:
    """Return what `coded_linear` returns, for 1 to `MAX_ROWS` rows of x in half precision; `why_not` has to be None.

    The weight is read before earlier kernels have ended: no kernel of a step may write it.
    """
    (num_rows, depth), columns, groups = x.shape, codes.shape[0], scale.shape[1]
    shape = CodedShape(num_rows, columns, depth, bits, depth // groups)
    config = config or default_config(shape)
    fp8, block_k = codes.dtype == torch.float8_e4m3fn, config.block_k
    codes = codes.view(torch.uint8) if fp8 else codes
    out = x.new_empty((num_rows, columns))
    zeros = out if zero_point is None else zero_point.contiguous()  # any pointer where there is nothing
    scale = scale if scale.stride(1) == 1 else scale.contiguous()
    steps, tiles = triton.cdiv(depth, block_k), triton.cdiv(columns, COLUMNS)
    splits = min(config.split_k, steps)
    slots = _PER_MULTIPROCESSOR * launching.num_multiprocessors()
    programs = tiles * splits if splits > 1 else min(tiles, slots)
    height, width = max(8, triton.next_power_of_2(num_rows)), block_k // 8 if bits == 4 else block_k
    room = launching.shared_bytes_of_two() - _LEFT_BYTES
    fitting = room // (COLUMNS * width * codes.itemsize + height * block_k * x.itemsize)
    partial = arrived = out
    if splits > 1:
        partial = x.new_empty(programs * COLUMNS * height, dtype=torch.float32)
        arrived = counters(programs, x.device)
    launching.launch(
        hopper_coded_kernel,
        (programs,),
        described(codes, COLUMNS, width),
        described(x, height, block_k),
        scale,
        Pointers(out if bias is None else bias.contiguous(), zeros, out, partial, arrived),
        *(num_rows, columns, scale.stride(0) if scale.shape[0] > 1 else 0, zeros.stride(0), out.stride(0)),
        Sizes(steps, tiles, shape.group, groups),
        SPEC=Spec(
            block_m=height,
            block_k=block_k,
            sub=min(shape.group & -shape.group, block_k) if groups > 1 else block_k,
            stages=min(_MOST_STAGES, fitting, triton.cdiv(steps, splits) * triton.cdiv(tiles * splits, programs)),
            splits=splits,
            bits=bits,
            fp8=fp8,
            has_zero=zero_point is not None,
            has_bias=bias is not None,
        ),
        num_warps=4,
    )
    return out
