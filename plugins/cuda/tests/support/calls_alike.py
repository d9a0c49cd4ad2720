"""Batch-invariant kernels at the sizes of a model of 8 B parameters, for tools/cuda/compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from core_cuda.ops.alike.attention import turn_and_attend, write_and_attend
from core_cuda.ops.alike.linear import multiply

ROWS = (1, 64, 1024)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield products, then attention of decode steps and of prompts."""
    for dtype in (torch.bfloat16, torch.float32):
        for columns, depth in ((6144, 4096), (28672, 4096)) if dtype == torch.bfloat16 else ((6144, 4096),):
            for rows in ROWS:
                x, weight = torch.empty(rows, depth, dtype=dtype), torch.empty(columns, depth, dtype=dtype)
                yield f"alike linear {rows} x {columns} x {depth}, {dtype}", partial(multiply, x, weight, None)
    x, weight = torch.empty(1, 768, dtype=torch.bfloat16), torch.empty(768, 2304, dtype=torch.bfloat16).T
    yield "alike linear, transposed", partial(multiply, x, weight, torch.empty(2304, dtype=torch.bfloat16))
    for size in (64, 128, 256):
        for tokens, seqs in ((1, 1), (64, 64), (1024, 1)):
            for options in ({}, {"window": 512, "softcap": 30.0, "sinks": torch.empty(32, dtype=torch.bfloat16)}):
                if (options or size != 128) and tokens == 64:
                    continue
                cache = torch.empty(2, 4096, 16, 8, size, dtype=torch.bfloat16)
                query, new = (torch.empty(tokens, heads, size, dtype=torch.bfloat16) for heads in (32, 8))
                places = (
                    *cache,
                    torch.empty(seqs, 64, dtype=torch.int32),
                    torch.empty(tokens, dtype=torch.int64),
                    torch.empty(seqs, dtype=torch.int32),
                    torch.empty(seqs + 1, dtype=torch.int32),
                )
                name = f"{size}, {tokens} of {seqs}{', windowed' if options else ''}"
                call = partial(write_and_attend, query, new, new, *places, scale=0.1, **options)
                yield f"alike attention {name}", call
                if size == 128 and not options and tokens == 64:
                    table, weight = torch.empty(tokens, size, dtype=torch.bfloat16), new[0, 0]
                    norm = {"normalize": True, "query_weight": weight, "key_weight": weight, "eps": 1e-5}
                    turned = (query, new, new, table, table, *places)
                    yield f"alike rotary attention {name}", partial(turn_and_attend, *turned, scale=0.1, **norm)
