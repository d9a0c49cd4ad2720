"""How attention over prompts is launched at compute capability 9: which steps a kernel of its own takes, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from core_cuda.ops import launching
from core_cuda.ops.attention.hopper_kernel import hopper_kernel
from core_cuda.ops.attention.hopper_tiles import ROWS, Numbers, Spec, Step

_CAPABILITY = 9
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_LARGEST_HEAD = 256
_SMALLEST_BLOCK = 64  # features: rows of 128 bytes, the widest pattern that matrix units read
_WIDE = 128  # beyond it a tile of 128 keys leaves no registers for the result
_ALIGNED = 16  # elements that rows must start at, to be copied 16 bytes at a time
_MOST_PACKED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperConfig:
    """How the kernel is compiled: a tile has `pack` heads of each of 128 / pack tokens, and block_n keys at a time."""

    block_n: int
    pack: int
    num_stages: int = 2


def choose(step: Step, window: int, softcap: float) -> HopperConfig | None:
    """Return the configuration for a step, None where the kernel does not take it or `prefill_kernel` is faster.

    It has no soft caps and reads no codes. On an H100 it measured slower with windows over heads of 64, and no faster
    where tiles do not fill half of the multiprocessors.
    """
    if launching.INTERPRETED or launching.capability()[0] != _CAPABILITY:
        return None
    num_tokens, num_heads, size = step.query.shape
    value_size, group = step.value.shape[2], num_heads // step.key.shape[1]
    tensors = (step.query, step.key, step.value, step.key_cache, step.value_cache)
    taken = step.query.dtype in _DTYPES and all(x.dtype == step.query.dtype for x in tensors)
    taken = taken and all(_is_aligned(x) for x in tensors) and max(size, value_size) <= _LARGEST_HEAD
    slow = softcap or (window and size <= _SMALLEST_BLOCK)
    if not taken or slow or 2 * num_tokens * num_heads < ROWS * launching.num_multiprocessors():
        return None
    block_n = 64 if max(size, value_size) > _WIDE else 128
    return HopperConfig(block_n=block_n, pack=min(group & -group, _MOST_PACKED))


def _is_aligned(x: Tensor) -> bool:
    """Return whether the features of x start where copies of 16 bytes can, and end there."""
    sizes = (*x.stride()[:-1], x.shape[-1])
    return x.data_ptr() % 16 == 0 and all(size > 0 and size % _ALIGNED == 0 for size in sizes)


def launch(
    step: Step, numbers: Numbers, config: HopperConfig, *, causal: bool, chunked: bool, prompts_only: bool
) -> None:
    """Write the attention of a step into step.out; prompts_only: but for sequences that have one new token."""
    num_kv_heads, size, value_size = step.key.shape[1], step.key.shape[2], step.value.shape[2]
    block_d, block_v = (max(_SMALLEST_BLOCK, triton.next_power_of_2(n)) for n in (size, value_size))
    group = step.query.shape[1] // num_kv_heads
    spec = Spec(
        causal=causal,
        window=numbers.window > 0,
        chunked=chunked,
        group=group,
        pack=config.pack,
        page=step.key_cache.shape[1],
        d=size,
        v=value_size,
        block_n=config.block_n,
        block_d=block_d,
        block_v=block_v,
        stages=config.num_stages,
        prompts_only=prompts_only,
    )
    launching.launch(
        hopper_kernel,
        (
            num_kv_heads * triton.cdiv(group, config.pack),
            numbers.num_tokens // (ROWS // config.pack) + numbers.num_seqs + 1,
        ),
        step,
        numbers,
        _described(step.key, config.block_n, block_d),
        _described(step.value, config.block_n, block_v),
        SPEC=spec,
        BLOCK_B=triton.next_power_of_2(numbers.num_seqs + 1),
        num_warps=4,
    )


def _described(x: Tensor, block_n: int, block: int) -> TensorDescriptor:
    """Describe x (T, heads, features) as (heads, T, features), loaded by (1, block_n, block); zeros lie beyond."""
    x = x.transpose(0, 1)
    tile = [1, block_n, block]
    layout = gl.NVMMASharedLayout.get_default_for(tile, _DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), tile, layout)
