"""Calls of prefill attention as the 8B and 1B shapes of Llama make them, for compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from core_cuda.ops.attention.decode import Coding
from core_cuda.ops.attention.prefill import prefill
from core_cuda.ops.attention.prefill_config import PrefillShape, candidates

PAGE = 16


def arguments(
    tokens: int, heads: int, kv_heads: int, size: int, *, dtype: torch.dtype = torch.bfloat16, seqs: int = 1
) -> dict[str, Tensor]:
    """Return query, key and value as parts of one merged projection, and a cache of 4096 positions per sequence."""
    merged = torch.empty(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    cache = torch.empty(2, 4096 // PAGE * seqs + 1, PAGE, kv_heads, size, dtype=dtype)
    return {
        "query": merged[:, :heads],
        "key": merged[:, heads : heads + kv_heads],
        "value": merged[:, heads + kv_heads :],
        "key_cache": cache[0],
        "value_cache": cache[1],
        "block_table": torch.empty(seqs, 4096 // PAGE, dtype=torch.int32),
        "slot_mapping": torch.empty(tokens, dtype=torch.int64),
        "seq_lens": torch.empty(seqs, dtype=torch.int32),
        "query_starts": torch.empty(seqs + 1, dtype=torch.int32),
    }


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the shapes with the configuration chosen for them, then all candidates of the largest."""
    shapes: dict[str, tuple[tuple[int, int, int, int], dict[str, Any], dict[str, Any]]] = {
        "8b 128": ((128, 32, 8, 128), {}, {}),
        "8b 4096": ((4096, 32, 8, 128), {}, {}),
        "8b 4096 in 8": ((4096, 32, 8, 128), {"seqs": 8}, {}),
        "1b 4096": ((4096, 32, 8, 64), {}, {}),
        "gemma 2": ((4096, 8, 4, 256), {}, {"softcap": 50.0, "window": 4096}),
        "gpt-oss": ((4096, 64, 8, 64), {}, {"sinks": torch.empty(64, dtype=torch.bfloat16), "window": 128}),
        "llama 4": ((4096, 40, 8, 128), {}, {"window": 2048, "chunked": True}),
        "head 80": ((4096, 32, 32, 80), {}, {}),
        "head 192": ((4096, 16, 16, 192), {}, {}),
        "head 256": ((4096, 16, 8, 256), {}, {"window": 1024}),
        "fp32": ((1024, 32, 8, 128), {"dtype": torch.float32}, {}),
    }
    for name, (sizes, build, options) in shapes.items():
        call = arguments(*sizes, **build)
        yield name, lambda call=call, options=options: prefill(**call, scale=0.125, **options)  # type: ignore[misc]
    for name, sizes in (("8b", (4096, 32, 8, 128)), ("1b", (4096, 32, 8, 64))):
        call = arguments(*sizes)
        call |= {cache: call[cache].to(torch.float8_e4m3fn) for cache in ("key_cache", "value_cache")}
        call |= {scale: torch.empty(()) for scale in ("k_scale", "v_scale")}
        coding = Coding(torch.empty(sizes[0], sizes[1], sizes[3], dtype=torch.float8_e4m3fn), *torch.empty(2))
        for coded in (None, coding):
            yield (
                f"{name} codes{', coded' if coded else ''}",
                lambda call=call, coded=coded: prefill(**call, scale=0.125, coding=coded),  # type: ignore[misc]
            )
    for size in (128, 64):
        tokens, heads, kv_heads = 4096, 32, 8
        shape = PrefillShape(
            num_tokens=tokens,
            num_seqs=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            key_size=size,
            value_size=size,
            element_bytes=2,
        )
        call = arguments(tokens, heads, kv_heads, size)
        for config in candidates(shape):
            yield (
                f"candidate {size} {config}",
                lambda call=call, config=config: prefill(  # type: ignore[misc]
                    **call, scale=0.125, config=config
                ),
            )
