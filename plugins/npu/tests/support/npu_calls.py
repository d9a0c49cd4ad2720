"""Calls of canonical ops that the kernels of torch_npu take: what their own samples, made for any device, leave out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from core.common.ops.mlp.activation import GATED_ACTIVATION
from core.common.ops.norm.norms import ADD_RMS_NORM
from tests.kernel_cases import CPU, randn

Call = dict[str, Any]

LENGTHS: Mapping[str, Mapping[str, Any]] = {
    "decode": {"lens": ((1, 7), (1, 1), (1, 33)), "max_query_len": 1},
    "decode padded": {"lens": ((1, 7), (1, 17)), "padding": (2, 2), "max_query_len": 1},
    "prefill": {"lens": ((5, 5), (21, 21))},
    "chunk and mixed": {"lens": ((3, 39), (1, 6), (7, 7)), "padding": (4, 1)},
    "padding without a sequence to spare": {"lens": ((3, 9), (7, 7)), "padding": (5, 0)},
    "window 3": {"lens": ((9, 20), (1, 18)), "window": 3},
    "bidirectional": {"lens": ((4, 4), (3, 3)), "causal": False},
    "odd scale": {"lens": ((5, 5), (2, 19)), "scale": 0.37},
}
"""Calls of attention by name: (query length, sequence length) of each sequence, and what is special."""


def attention_call(
    dtype: torch.dtype,
    lens: tuple[tuple[int, int], ...],
    *,
    size: int = 64,
    heads: tuple[int, int] = (4, 2),
    page: int = 16,
    padding: tuple[int, int] = (0, 0),
    seed: int = 0,
    **options: Any,
) -> Call:
    """Return a call of `core::attention` with blocks of `page` positions; padding: extra (tokens, sequences)."""
    generator = torch.Generator().manual_seed(seed)
    num_seqs = len(lens) + padding[1]
    blocks_each = max((-(-length // page) for _, length in lens), default=1)
    num_blocks = 1 + len(lens) * blocks_each
    table = torch.zeros(num_seqs, blocks_each, dtype=torch.int32)
    order = 1 + torch.randperm(num_blocks - 1, generator=generator)
    table[: len(lens)] = order.view(len(lens), blocks_each)
    slots = [
        int(table[i, p // page]) * page + p % page
        for i, (new, length) in enumerate(lens)
        for p in range(length - new, length)
    ]
    starts = [0]
    for new, _ in lens:
        starts.append(starts[-1] + new)
    num_tokens = len(slots) + padding[0]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def index(data: list[int], length: int, fill: int, kind: torch.dtype) -> Tensor:
        return torch.tensor(data + [fill] * (length - len(data)), dtype=kind)

    return {
        "query": random(num_tokens, heads[0], size),
        "key": random(num_tokens, heads[1], size),
        "value": random(num_tokens, heads[1], size),
        "key_cache": random(num_blocks, page, heads[1], size),
        "value_cache": random(num_blocks, page, heads[1], size),
        "block_table": table,
        "slot_mapping": index(slots, num_tokens, 0, torch.int64),
        "seq_lens": index([length for _, length in lens], num_seqs, 0, torch.int32),
        "query_starts": index(starts, num_seqs + 1, starts[-1], torch.int32),
        "scale": size**-0.5,
        **options,
    }


def rotary_attention_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Yield calls of `core::rotary_attention` by name: each way to turn, over one batch of chunks and decode."""
    weights = {f"{name}_weight": randn(64, dtype=dtype, seed=3, scale=0.4, shift=1.0) for name in ("query", "key")}
    near_zero = {name: weight - 1 for name, weight in weights.items()}
    ways: dict[str, tuple[int, Call]] = {
        "half": (64, {}),
        "one value per pair": (32, {}),
        "interleaved": (64, {"style": "interleaved"}),
        "deinterleave": (64, {"style": "deinterleave"}),
        "partial": (24, {"rotary_dim": 24}),
        "wide": (64, {"compute_dtype": torch.float32}),
        "qwen3": (64, {"normalize": True, **weights, "eps": 1e-6, "normed_dtype": dtype}),
        "gemma3": (64, {"normalize": True, **near_zero, "eps": 1e-5, "offset": 1.0, "window": 3}),
        "norms without weights": (64, {"normalize": True, "eps": 3e-4}),
    }
    for name, (width, options) in ways.items():
        call = attention_call(dtype, ((3, 39), (1, 6), (7, 7)), padding=(4, 1))
        yield name, {**call, **tables(len(call["query"]), width, dtype), **options}
    decode = attention_call(dtype, ((1, 7), (1, 17)), padding=(1, 1), size=48, max_query_len=1)
    yield "decode, heads of 48", {**decode, **tables(len(decode["query"]), 48, dtype)}


def tables(num_tokens: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return cos and sin (T, width) of positions from 3 on."""
    frequencies = 10_000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(3, 3 + num_tokens, dtype=torch.float64), frequencies)
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def rotary_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of `core::rotary` in every form: tables by sequence or shared, heads on either side of tokens."""

    def call(shape: tuple[int, ...], table: tuple[int, ...], turned: bool = False, **options: Any) -> Call:
        query, key = (randn(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
        if turned:
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        angles = randn(*table, dtype=torch.float32, seed=5)
        return {"query": query, "key": key, "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype), **options}

    for style in ("half", "interleaved"):
        yield call((3, 5, 4, 32), (3, 1, 5, 32), turned=True, style=style)
        yield call((3, 5, 4, 32), (1, 1, 5, 32), turned=True, style=style)
        yield call((3, 4, 5, 32), (3, 1, 5, 32), style=style)
        yield call((3, 5, 4, 32), (1, 5, 1, 32), style=style)
        yield call((3, 4, 1, 32), (3, 1, 1, 32), style=style)
        yield call((1, 4, 5, 32), (5, 32), style=style)
        yield call((5, 4, 32), (5, 1, 32), style=style)
        yield call((4, 5, 32), (1, 5, 32), style=style)
    for options in ({"rotary_dim": 8}, {"style": "deinterleave"}):
        # In memory features lie apart, heads last but one: torch.cat keeps that order.
        width = options.get("rotary_dim", 16)
        across = call((7, 3, 2, 16), (7, 1, 2, width), **options)
        yield across | {n: across[n].contiguous(memory_format=torch.channels_last) for n in ("query", "key")}
        single = call((7, 1, 4, 16), (7, 1, 4, width), **options)
        yield single | {n: single[n].contiguous(memory_format=torch.channels_last) for n in ("query", "key")}
    yield call(
        (251, 2, 4, 6), (1, 2, 1, 6), style="interleaved"
    )  # more sequences times heads than the kernel takes with one table


def coded_norms(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of `core::add_rms_norm_quantize` by token, and with one scale given where the kernel takes it."""
    for sample in ADD_RMS_NORM.samples(dtype, CPU):
        yield {**sample.kwargs, "scale": None, "dtype": torch.int8}
        yield {**sample.kwargs, "scale": torch.tensor(0.02), "dtype": torch.int8, "granularity": "tensor"}


def coded_gates(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of `core::gated_activation_quantize` with halves of 64: every kind, order, and cut."""
    codes = {"up": None, "scale": None, "dtype": torch.int8}
    forms: list[Call] = [
        {"kind": "silu"},
        {"kind": "silu", "gate_first": False},
        {"kind": "silu", "limit": 2.0},
        {"kind": "silu", "limit": 2.0, "interleaved": True},
        {"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0, "interleaved": True},
        {"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0},
        {"kind": "gelu"},
        {"kind": "silu", "interleaved": True},
    ]
    for form in forms:
        yield {"gate": randn(7, 128, dtype=dtype, scale=4.0), **codes, **form}
    yield {"gate": randn(2, 3, 256, dtype=dtype)[..., 64:192], **codes, "kind": "silu"}
    yield {"gate": torch.cat((randn(2, 64, dtype=dtype), torch.zeros(2, 64, dtype=dtype)), -1), **codes, "kind": "silu"}


def gates(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of `core::gated_activation_fused` that cut off, alternate, or have the gate last."""
    both = randn(5, 80, dtype=dtype, scale=8.0)
    for kind in ("silu", "quick_gelu", "gelu", "gelu_tanh"):
        yield {"gate_up": both, "kind": kind, "limit": 3.0}
        yield {"gate_up": both, "kind": kind, "limit": 3.0, "up_offset": 1.0, "interleaved": True}
        yield {"gate_up": both, "kind": kind, "gate_first": False}
    yield {"gate_up": randn(64, 9, dtype=dtype).t(), "kind": "silu"}
    yield {"gate_up": randn(2, 3, 5, 64, dtype=dtype).permute(2, 0, 1, 3), "kind": "gelu"}


def halves(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of `core::gated_activation` on halves of one tensor, and on tensors that only look so."""
    whole = randn(2, 3, 5, 80, dtype=dtype)
    for both in (whole, whole.transpose(1, 2), randn(7, 200, dtype=dtype)[:, 60:140], randn(80, dtype=dtype)):
        first, second = both.chunk(2, dim=-1)
        yield {"gate": first, "up": second, "kind": "silu"}
        yield {"gate": second, "up": first, "kind": "silu"}
    yield from (sample.kwargs for sample in GATED_ACTIVATION.samples(dtype, CPU))


def code_linears(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of `core::weight_only_linear` with groups that the kernel takes, and of scales in half precision."""
    for groups, zeros in ((1, True), (3, False), (3, True)):
        scale = randn(24, groups, scale=0.002, shift=0.01, seed=1)
        codes = randn(24, 96, scale=40.0, seed=2).to(torch.int8)
        zero = randn(24, groups, scale=3.0, seed=3).to(torch.int8) if zeros else None
        call = {"x": randn(7, 96, dtype=dtype), "w_codes": codes, "w_zero_point": zero, "bias": randn(24, dtype=dtype)}
        yield {**call, "w_scale": scale}
        yield {**call, "w_scale": scale.to(dtype)}
        yield {**call, "w_scale": scale.to(dtype), "bias": None, "x": randn(2, 3, 96, dtype=dtype)}


def routes(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of `core::moe_route` with 16 experts: groups scored by one or two, biases, factors."""
    order = randn(21, 16, dtype=torch.float64).argsort(-1)
    logits = ((order - 7.3) * 0.21).to(dtype)
    bias = randn(16, dtype=dtype, seed=4, scale=0.5)
    grouped = {"num_groups": 4, "top_groups": 2}
    sigmoid = {"scoring": "sigmoid", "renormalize": True, "renormalize_eps": 1e-20}
    for options in (
        {"top_k": 3, "scale": 2.5},
        {"top_k": 3, **grouped, "scored_per_group": 1},
        {"top_k": 3, **grouped},
        {"top_k": 3, **sigmoid},
        {"top_k": 3, **sigmoid, **grouped, "bias": bias, "scale": 2.5},
        {"top_k": 3, "out_dtype": torch.float32, "renormalize": True},
        {"top_k": 3, "scoring": "softmax_selected"},
    ):
        yield {"logits": logits, **options}


def experts(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of `core::grouped_mlp` with a single token, so many that they can be judged together."""
    for seed, gated in product(range(5), (True, False)):
        yield {
            "x": randn(1, 16, dtype=dtype, seed=seed),
            "weights": randn(1, 2, dtype=dtype, seed=seed + 10).sigmoid(),
            "indices": torch.tensor([[seed, (seed + 2) % 5]]),
            "gate_up": randn(5, 48 if gated else 24, 16, dtype=dtype, scale=0.3, seed=seed + 20),
            "down": randn(5, 16, 24, dtype=dtype, scale=0.3, seed=seed + 30),
            "kind": "silu" if gated else "relu2",
            "gated": gated,
        }
