"""How much memory vLLM's key/value cache takes for the cells of a bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FILL_TOKENS = 8192
"""Prompt tokens of a step: as many as the bench gives `core`."""
_BLOCK = 16
_SPARE = 8
"""Tokens, so that no sequence ends, and leaves, inside a measured step."""
BESIDE = 3 << 30
"""Bytes beside weights and cache: the CUDA context, activations of FILL_TOKENS tokens, graphs, workspaces."""
_SHARE = 1.1
"""vLLM groups layers whose caches differ and rounds the groups up, and blocks of the round before stay for a while."""


def longest(num_seqs: int, limit: int) -> int:
    """Return the most tokens of a sequence: the first ones generate while the prompts of the last are computed."""
    return limit + -(-num_seqs * limit // FILL_TOKENS) + _SPARE


def bytes_per_token(config: Mapping[str, Any], itemsize: int) -> int:
    """Return the bytes of one token's keys and values in all layers, by the fields of `config.json`.

    Latent attention (`kv_lora_rank`) keeps one vector for both. Windows are not counted: this is an upper bound.
    """
    text = config.get("text_config") or config
    layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
    if latent := text.get("kv_lora_rank"):
        return layers * (int(latent) + int(text.get("qk_rope_head_dim") or 0)) * itemsize
    size = int(text.get("head_dim") or text["hidden_size"] // heads)
    return layers * 2 * int(text.get("num_key_value_heads") or heads) * size * itemsize


def cache_bytes(per_token: int, num_seqs: int, limit: int) -> int:
    """Return the bytes of the cache for so many sequences."""
    blocks = num_seqs * (-(-longest(num_seqs, limit) // _BLOCK) + 1) + 1
    return int(_SHARE * blocks * _BLOCK * per_token)


def fitting(sizes: Sequence[tuple[int, int]], per_token: int, weights: int, free: int) -> list[tuple[int, int]]:
    """Return those of `sizes` (sequences, limit) for which a device with `free` bytes has room, smallest first."""
    room = free - weights - BESIDE
    return sorted(each for each in sizes if cache_bytes(per_token, *each) <= room)
