"""Calls of the rotary ops as the 8B and 1B shapes of Llama and Qwen 3 make them, for compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from core_cuda.ops.attention.prefill import prefill_rotary_attention
from core_cuda.ops.rotary import rotation as rotary
from core_cuda.ops.rotary import table as rotary_table

PAGE = 16


def heads_of(merged: Tensor, size: int, *counts: int) -> list[Tensor]:
    """Return the parts of a merged projection (1, T, width) as (1, heads, T, size), strided as it leaves them."""
    parts = merged.split([count * size for count in counts], dim=-1)
    return [part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts]


def tables(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return cos and sin."""
    return {"cos": torch.empty(*shape, dtype=dtype), "sin": torch.empty(*shape, dtype=dtype)}


def step(tokens: int, heads: int, kv_heads: int, size: int) -> dict[str, Tensor]:
    """Return the tensors of `core::rotary_attention` for one sequence, parts of one merged projection."""
    merged = torch.empty(tokens, heads + 2 * kv_heads, size, dtype=torch.bfloat16)
    cache = torch.empty(2, 257, PAGE, kv_heads, size, dtype=torch.bfloat16)
    query, key, value = merged.split([heads, kv_heads, kv_heads], dim=1)
    return {
        "query": query,
        "key": key,
        "value": value,
        **tables(tokens, size),
        "key_cache": cache[0],
        "value_cache": cache[1],
        "block_table": torch.empty(1, 256, dtype=torch.int32),
        "slot_mapping": torch.empty(tokens, dtype=torch.int64),
        "seq_lens": torch.empty(1, dtype=torch.int32),
        "query_starts": torch.empty(2, dtype=torch.int32),
    }


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the ops at one, 64 and 4096 tokens, in the layouts that models leave."""
    for name, heads, kv_heads, size in (("8b", 32, 8, 128), ("1b", 32, 8, 64)):
        for tokens in (1, 64, 4096):
            merged = torch.empty(1, tokens, (heads + 2 * kv_heads) * size, dtype=torch.bfloat16)
            query, key, _ = heads_of(merged, size, heads, kv_heads, kv_heads)
            call: dict[str, Any] = {"query": query, "key": key, **tables(1, 1, tokens, size)}
            yield f"{name} rotary {tokens}", lambda call=call: rotary.rotary(**call)  # type: ignore[misc]
            angles = (torch.empty(1, tokens, dtype=torch.int64), torch.empty(size // 2))
            yield (
                f"{name} table {tokens}",
                lambda angles=angles: rotary_table.run_rotary_table(*angles, out_dtype=torch.bfloat16),  # type: ignore[misc]
            )
            call = {**call, "style": "interleaved"}
            yield f"{name} interleaved {tokens}", lambda call=call: rotary.rotary(**call)  # type: ignore[misc]
            weights = {n: torch.empty(size, dtype=torch.bfloat16) for n in ("query_weight", "key_weight")}
            call = {**call, **weights, "style": "half", "eps": 1e-6, "normed_dtype": torch.bfloat16}
            yield f"{name} qk norm {tokens}", lambda call=call: rotary.qk_norm_rotary(**call)  # type: ignore[misc]
            call = {**step(tokens, heads, kv_heads, size), "scale": size**-0.5}
            yield f"{name} attention {tokens}", lambda call=call: prefill_rotary_attention(**call)  # type: ignore[misc]
            scales = {name: torch.empty(kv_heads) for name in ("k_scale", "v_scale")}
            caches = {name: call[name].to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}
            for style in ("half", "interleaved"):
                coded = {**call, **scales, **caches, "style": style}
                yield f"{name} codes, {style} {tokens}", lambda call=coded: prefill_rotary_attention(**call)  # type: ignore[misc]
            call = {**call, **weights, "normalize": True, "eps": 1e-6, "normed_dtype": torch.bfloat16}
            yield (
                f"{name} norms and attention {tokens}",
                lambda call=call: prefill_rotary_attention(  # type: ignore[misc]
                    **call
                ),
            )
