"""Calls of the kernels for mixtures, of Qwen3-30B-A3B and Nemotron 3 among others, for compile_cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core_cuda.ops.linear.widened import widened_linear
from core_cuda.ops.moe.grouped_mlp import grouped_mlp
from core_cuda.ops.moe.pairs import order_pairs, weighted_sum
from core_cuda.ops.moe.route import moe_route
from core_cuda.ops.moe.shared_gate import add_gated_expert

BF16 = torch.bfloat16
TOKENS = (1, 8, 64, 128, 1024, 4096)


def experts(num: int, hidden: int, inner: int, *, gated: bool = True, transposed: bool = False) -> dict[str, Tensor]:
    """Return weights that nobody reads or writes, so that they take no memory."""
    shapes = {"gate_up": (num, 2 * inner if gated else inner, hidden), "down": (num, hidden, inner)}
    return {name: torch.empty((e, b, a) if transposed else (e, a, b), dtype=BF16) for name, (e, a, b) in shapes.items()}


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield routing and products with few and with many tokens."""
    qwen3, mixtral = experts(128, 2048, 768), experts(8, 4096, 14336)
    oss = experts(32, 2880, 2880, transposed=True)
    nemotron = experts(128, 2688, 1856, gated=False)
    oss_gate: dict[str, Any] = {"kind": "quick_gelu", "interleaved": True, "limit": 7.0, "up_offset": 1.0}
    oss_gate |= {"transposed": True, "gate_up_bias": torch.empty(32, 5760, dtype=BF16)}
    oss_gate |= {"down_bias": torch.empty(32, 2880, dtype=BF16)}
    for tokens in TOKENS:
        for name, width, top_k, weights, options in (
            ("qwen3", 2048, 8, qwen3, {"kind": "silu"}),
            ("mixtral", 4096, 2, mixtral, {"kind": "silu"}),
            ("gpt-oss", 2880, 4, oss, oss_gate),
            ("nemotron-h", 2688, 6, nemotron, {"kind": "relu2", "gated": False}),
        ):
            x, shares = torch.empty(tokens, width, dtype=BF16), torch.empty(tokens, top_k, dtype=BF16)
            indices = torch.empty(tokens, top_k, dtype=torch.int64)
            yield f"{name} {tokens}", partial(grouped_mlp, x, shares, indices, **weights, **options)
            if name == "qwen3":
                rows, places = torch.empty(tokens * top_k, width, dtype=BF16), torch.empty(tokens * top_k).long()
                yield f"{name} pairs {tokens}", partial(order_pairs, indices, 128)
                yield f"{name} sum {tokens}", partial(weighted_sum, rows, places, shares)
    for tokens in (1, 64):
        x, gate = torch.empty(tokens, 2048, dtype=BF16), torch.empty(1, 2048, dtype=BF16)
        yield f"qwen3 shared gate {tokens}", partial(add_gated_expert, x, gate, x, x)
        wide, weight = torch.empty(tokens, 7168, dtype=BF16), torch.empty(256, 7168, dtype=BF16)
        yield f"route deepseek-v3 {tokens}", partial(widened_linear, wide, weight)
    logits = torch.empty(64, 256, dtype=BF16)
    yield "route qwen3", partial(moe_route, logits[:, :128], 8, renormalize=True)
    yield "route gpt-oss", partial(moe_route, logits[:, :32], 4, scoring="softmax_selected")
    groups: dict[str, Any] = {"num_groups": 8, "top_groups": 4, "renormalize": True, "renormalize_eps": 1e-20}
    bias = torch.empty(256)
    yield "route deepseek-v3", partial(moe_route, logits, 8, scoring="sigmoid", bias=bias, scale=2.5, **groups)
    yield "route 512", partial(moe_route, torch.empty(64, 512, dtype=BF16), 10, renormalize=True)
