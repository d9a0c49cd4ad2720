"""Calls of the attention kernels for `compile_cuda_kernels.py`: decode of the 1B and 8B shapes and of some others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core_cuda.ops.attention import decode as decode_attention
from core_cuda.ops.attention.decode import Coding
from core_cuda.ops.attention.rotation import take_turning

PAGE, CONTEXT = 16, 2048
SHAPES = {"8b": (32, 8, 128, 128), "1b": (32, 8, 64, 64), "qwen3-moe": (32, 4, 128, 128), "mqa": (64, 1, 128, 128)}


def _operands(num_seqs: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, new: int = 1) -> dict[str, Any]:
    heads, kv_heads, head_size, value_size = sizes
    tokens, blocks = num_seqs * new, 64
    return {
        "query": torch.empty(tokens, heads, head_size, dtype=dtype),
        "key": torch.empty(tokens, kv_heads, head_size, dtype=dtype),
        "value": torch.empty(tokens, kv_heads, value_size, dtype=dtype),
        "key_cache": torch.empty(blocks, PAGE, kv_heads, head_size, dtype=dtype),
        "value_cache": torch.empty(blocks, PAGE, kv_heads, value_size, dtype=dtype),
        "block_table": torch.empty(num_seqs, CONTEXT // PAGE, dtype=torch.int32),
        "slot_mapping": torch.empty(tokens, dtype=torch.int64),
        "seq_lens": torch.empty(num_seqs, dtype=torch.int32),
        "query_starts": torch.empty(num_seqs + 1, dtype=torch.int32),
        "scale": head_size**-0.5,
        "window": 0,
        "softcap": 0.0,
        "sinks": None,
        "max_query_len": new,
    }


def _in_codes(args: dict[str, Any], scale: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the operands with caches of codes and their scales."""
    args |= {name: args[name].to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}
    return args | {name: torch.empty(scale) for name in ("k_scale", "v_scale")}


def _coding(num_tokens: int, sizes: tuple[int, int, int, int]) -> Coding:
    codes = torch.empty(num_tokens, sizes[0], sizes[3], dtype=torch.float8_e4m3fn)
    return Coding(codes, torch.empty(()), torch.empty(()))


def _rotated(
    num_seqs: int, sizes: tuple[int, int, int, int], norm: bool, *, codes: bool = False
) -> Callable[[], object]:
    args, half = _operands(num_seqs, sizes, torch.bfloat16), sizes[2] // 2
    args = _in_codes(args, (sizes[1],)) if codes else args
    args |= {name: torch.empty(num_seqs, half, dtype=torch.float32) for name in ("cos", "sin")}
    if norm:
        weights = {name: torch.empty(sizes[2], dtype=torch.bfloat16) for name in ("query_weight", "key_weight")}
        args |= {**weights, "normalize": True, "eps": 1e-6, "normed_dtype": torch.bfloat16}
    # Not by the op: that would want a GPU.
    args = dict(ROTARY_ATTENTION.bind((), args).args)
    coding = _coding(num_seqs, sizes) if codes else None
    return lambda: decode_attention.decode(turning=take_turning(args), coding=coding, **args)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (name, call)."""

    def decode(
        *args: Any, config: Any = None, new: int = 1, codes: bool = False, **options: Any
    ) -> Callable[[], object]:
        operands = _operands(*args, new=new)
        operands = (_in_codes(operands) if codes else operands) | options
        return lambda: decode_attention.decode(**operands, config=config)

    for name, sizes in SHAPES.items():
        for num_seqs in (1, 8, 64):
            yield f"{name} decode {num_seqs}", decode(num_seqs, sizes, torch.bfloat16)
    for name, num_seqs, norm in (("1b", 1, False), ("8b", 1, False), ("8b", 64, False), ("qwen3-moe", 1, True)):
        yield f"{name} rotated {num_seqs}", _rotated(num_seqs, SHAPES[name], norm)
    for name, num_seqs in itertools.product(("8b", "1b"), (1, 8, 64)):
        yield f"{name} codes {num_seqs}", decode(num_seqs, SHAPES[name], torch.bfloat16, codes=True)
    yield "8b codes, rotated 8", _rotated(8, SHAPES["8b"], False, codes=True)
    yield "8b coded 8", decode(8, SHAPES["8b"], torch.bfloat16, coding=_coding(8, SHAPES["8b"]))
    yield "8b drafts 8", decode(8, SHAPES["8b"], torch.bfloat16, new=5)
    yield "drafts of groups of 8, heads of 64", decode(8, (64, 8, 64, 64), torch.bfloat16, new=8)
    yield "8b windowed sinks", decode(8, SHAPES["8b"], torch.bfloat16, window=512, sinks=torch.empty(32))
    yield "llama 4 chunks 8", decode(8, (40, 8, 128, 128), torch.bfloat16, window=2048, chunked=True)
    yield "mqa drafts 512", decode(8, (16, 1, 512, 512), torch.bfloat16, new=4)
    yield "mqa drafts 256", decode(8, (16, 1, 256, 256), torch.bfloat16, new=2)
    yield "8b fp32", decode(8, SHAPES["8b"], torch.float32)
    for size in (80, 192, 256, 512):
        yield f"head {size} softcap", decode(8, (16, 8, size, size), torch.bfloat16, softcap=50.0)
