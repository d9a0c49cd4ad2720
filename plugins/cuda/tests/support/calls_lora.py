"""What adapters add, at the sizes of models of 1 and 8 B parameters, for tools/cuda/compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from core_cuda.ops.linear.lora import add_lora

LAYERS = {"qkv": (4096, (4096, 1024, 1024)), "down": (14336, (4096,)), "1b gate and up": (2048, (8192, 8192))}


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield steps of decode and prompts, of four adapters and of many."""
    for dtype, numbers in ((torch.bfloat16, (1, 8, 64, 4096)), (torch.float32, (8, 64))):
        for rows in numbers:
            for name, (depth, sizes) in LAYERS.items():
                for num_slots, rank in ((4, 16), (32, 8), (2, 64)) if name == "qkv" else ((4, 16),):
                    width = num_slots * rank
                    call = partial(
                        add_lora,
                        torch.empty(rows, sum(sizes), dtype=dtype),
                        torch.empty(rows, depth, dtype=dtype),
                        torch.empty(len(sizes) * width, depth, dtype=dtype),
                        torch.empty(sum(sizes), width, dtype=dtype),
                        torch.empty(rows, dtype=torch.int64),
                        rank=rank,
                        sizes=sizes,
                    )
                    yield f"lora {rows} x {name}, {num_slots} of rank {rank}, {str(dtype)[6:]}", call
