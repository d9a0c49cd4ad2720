"""How products with few rows are launched at compute capability 9: which ones the kernel takes, and with what sizes."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from core_cuda.ops import launching
from core_cuda.ops.activation import Gate
from core_cuda.ops.linear.hopper_kernel import Pointers, Sizes, Spec, hopper_linear_kernel
from core_cuda.ops.linear.hopper_shares import COLUMNS
from core_cuda.ops.linear.skinny_configs import SkinnyConfig
from core_cuda.ops.workspace import counters

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
_INTEGERS = {torch.int32: gl.int32, torch.int8: gl.int8, torch.uint8: gl.uint8}
_ALIGNED = 16  # bytes at which rows begin that descriptors load


def takes(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the kernel takes a product of x (M, K) and weight (N, K); each row is one run of memory."""
    return x.dtype == weight.dtype and x.dtype in _DTYPES and all(is_aligned(each) for each in (x, weight))


def is_aligned(x: Tensor) -> bool:
    """Tell whether rows of x (R, C) begin where descriptors can load them."""
    return x.data_ptr() % _ALIGNED == 0 and x.stride(0) * x.itemsize % _ALIGNED == 0


def hopper_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gate: Gate | None,
    scales: tuple[Tensor, Tensor] | None,
    config: SkinnyConfig,
    *,
    early: bool,
) -> None:
    """Write the product that `skinny_linear` returns into out, as config says; `takes` has to be true.

    early: whether no kernel of a step writes the weight, so that it may be read before they have ended.
    """
    (num_rows, depth), columns = x.shape, out.shape[1]
    gated = gate or Gate("")
    first, second = (0, columns) if gated.gate_first else (columns, 0)
    block_m = max(8, triton.next_power_of_2(num_rows))
    steps, tiles = triton.cdiv(depth, config.block_k), triton.cdiv(columns, COLUMNS)
    splits = min(config.split_k, steps)
    programs = tiles * splits if splits > 1 else min(tiles, launching.num_multiprocessors())
    most = triton.cdiv(steps, splits) * triton.cdiv(tiles * splits, programs)  # that a program has
    spec = Spec(
        block_m=block_m,
        block_k=config.block_k,
        stages=min(config.num_stages, most),
        splits=splits,
        bits=8 * x.itemsize,
        gated=gate is not None,
        scaled=scales is not None,
        has_bias=bias is not None,
    )
    x_scale, w_scale = scales or (out, out)
    partial = arrived = out
    if splits > 1:
        size = programs * (2 if gate else 1) * COLUMNS * block_m
        partial, arrived = x.new_empty(size, dtype=torch.float32), counters(programs, x.device)
    launching.launch(
        hopper_linear_kernel,
        (programs,),
        described(weight, COLUMNS, config.block_k),
        described(x, block_m, config.block_k),
        None if early else weight,
        Pointers(out if bias is None else bias.contiguous(), x_scale, w_scale, out, partial, arrived),
        *(num_rows, columns, depth, weight.stride(0), out.stride(0)),
        Sizes(steps, tiles, first, second, int(x_scale.numel() > 1), int(w_scale.numel() > 1)),
        SPEC=spec,
        KIND=gated.kind,
        LIMIT=gated.limit,
        UP_OFFSET=gated.up_offset,
        num_warps=4,
    )


def described(x: Tensor, rows: int, columns: int) -> Any:
    """Describe x (R, C), each row one run of memory, as loaded by (rows, columns); zeros lie beyond."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], (_DTYPES | _INTEGERS)[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)
