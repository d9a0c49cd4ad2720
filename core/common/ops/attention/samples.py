"""Calls of `core::attention` worth testing, of every form that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.attention.cache import stored


def _call(
    draw: Draw,
    lens: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 16),
    padding: tuple[int, int] = (0, 0),
    **options: Any,
) -> dict[str, Any]:
    """Build one call: lens gives (query length, sequence length) per sequence, padding extra (tokens, sequences)."""
    generator = torch.Generator().manual_seed(hash((lens, heads, sizes, padding)) % 2**31)
    page, num_seqs = 4, len(lens) + padding[1]
    blocks_each = max((-(-length // page) for _, length in lens), default=1)
    num_blocks = 1 + len(lens) * blocks_each
    order = 1 + torch.randperm(num_blocks - 1, generator=generator)
    table = torch.zeros(num_seqs, blocks_each, dtype=torch.int32)
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

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(draw.dtype).to(draw.device)

    def index(data: list[int], length: int, fill: int, kind: torch.dtype) -> Tensor:
        return torch.tensor(data + [fill] * (length - len(data)), dtype=kind, device=draw.device)

    return {
        "query": randn(num_tokens, heads[0], sizes[0]),
        "key": randn(num_tokens, heads[1], sizes[0]),
        "value": randn(num_tokens, heads[1], sizes[1]),
        "key_cache": randn(num_blocks, page, heads[1], sizes[0]),
        "value_cache": randn(num_blocks, page, heads[1], sizes[1]),
        "block_table": table.to(draw.device),
        "slot_mapping": index(slots, num_tokens, 0, torch.int64),
        "seq_lens": index([length for _, length in lens], num_seqs, 0, torch.int32),
        "query_starts": index(starts, num_seqs + 1, starts[-1], torch.int32),
        "scale": sizes[0] ** -0.5,
        **options,
    }


_MIXED = ((3, 9), (1, 6), (7, 7))


def calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return calls of every form: decode, prefill, mixed, padded, grouped heads, windows, soft-cap, sinks, masks."""
    forms: dict[str, dict[str, Any]] = {
        "decode": {"lens": ((1, 7), (1, 1), (1, 13)), "max_query_len": 1},
        "decode padded": {"lens": ((1, 7), (1, 5)), "padding": (2, 2), "max_query_len": 1},
        "prefill": {"lens": ((5, 5), (11, 11))},
        "chunk and mixed": {"lens": _MIXED, "padding": (4, 1)},
        "window 3": {"lens": ((9, 9), (1, 8)), "window": 3},
        "chunks of 3": {"lens": ((9, 9), (2, 9), (1, 7)), "window": 3, "chunked": True},
        "chunks of 5, decode": {"lens": ((1, 5), (1, 6), (1, 14)), "window": 5, "chunked": True, "max_query_len": 1},
        "soft-cap": {"lens": ((6, 6), (1, 4)), "softcap": 2.5},
        "odd scale, value size 8": {"lens": ((5, 5), (2, 7)), "sizes": (16, 8), "scale": 0.37},
        "one kv head": {"lens": ((4, 4),), "heads": (6, 1)},
        "bidirectional": {"lens": ((4, 4), (3, 3)), "causal": False},
        **{name: {"lens": ((5, 5), (1, 7))} for name in ("sinks", "boolean mask", "additive mask per head")},
        "non-contiguous query": {"lens": ((5, 5), (1, 7))},
    }
    made = {name: _call(draw, **form) for name, form in forms.items()}
    width = made["sinks"]["block_table"].shape[1] * made["sinks"]["key_cache"].shape[1]

    def ramp(first: float, last: float, count: int) -> Tensor:
        return torch.linspace(first, last, count, dtype=draw.dtype, device=draw.device)

    made["sinks"]["sinks"] = ramp(-1, 2, 4)
    made["boolean mask"]["mask"] = torch.arange(6 * width, device=draw.device).view(6, 1, width) % 3 != 1
    made["additive mask per head"]["mask"] = ramp(-3, 3, 6 * 4 * width).view(6, 4, width)
    strided = made["non-contiguous query"]
    strided["query"] = strided["query"].transpose(0, 1).contiguous().transpose(0, 1)
    return made | _calls_of_codes(draw)


def _calls_of_codes(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return calls with caches of codes: one scale, one for each head, none, and values beyond their range.

    No scale is a fraction of small numbers: values of half precision over it would lie right between two codes.
    """

    def coded(k_scale: list[float], v_scale: list[float], **form: Any) -> dict[str, Any]:
        call = _call(draw, **form)
        for cache, scale, numbers in (("key_cache", "k_scale", k_scale), ("value_cache", "v_scale", v_scale)):
            given = torch.tensor(numbers, dtype=draw.wide, device=draw.device)
            call[scale] = (given if len(numbers) > 1 else given[0]) if numbers else None
            call[cache] = stored(call[cache], torch.float8_e4m3fn, call[scale])
        return call

    decode = {"lens": ((1, 7), (1, 1), (1, 13)), "padding": (1, 1), "max_query_len": 1}
    by_head = {"lens": _MIXED, "padding": (4, 1), "sizes": (16, 8)}
    return {
        "codes, decode": coded([0.02137], [0.01291], **decode),
        "codes, a scale per head": coded([0.02079, 0.11231], [0.03067, 0.00717], **by_head),
        "codes, no scale": coded([], [], lens=_MIXED, window=3),
        "codes, beyond the range": coded([0.00311], [0.00419, 0.02043], lens=_MIXED, softcap=2.5),
    }


def step_indices(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the integer tensors of a call as a step has them: sequences are half as long as they may be.

    Tokens are spread over them evenly. Each reads blocks of its own as far as there are any, and all tokens write to
    the null block.
    """
    table, starts, lens = (arguments[name] for name in ("block_table", "query_starts", "seq_lens"))
    num_seqs, width = table.shape
    num_blocks, page = arguments["key_cache"].shape[:2]
    blocks = torch.arange(num_seqs * width, device=table.device) % num_blocks
    tokens, most = arguments["query"].shape[0], arguments["max_query_len"]
    tokens = min(tokens, num_seqs * most) if most else tokens
    first = torch.arange(num_seqs + 1, device=starts.device) * tokens // max(num_seqs, 1)
    new = first.diff()
    return {
        "block_table": blocks.view(num_seqs, width).to(table.dtype),
        "query_starts": first.to(starts.dtype),
        "seq_lens": (new + (width * page - new).clamp(min=0) // 2).to(lens.dtype),
        "slot_mapping": torch.zeros_like(arguments["slot_mapping"]),
    }
