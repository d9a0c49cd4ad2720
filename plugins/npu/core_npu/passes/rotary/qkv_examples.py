"""Modules in which query, key, value and cache are fused, written as attention for the device is, for the suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_TOKENS, _HEADS, _KV_HEADS, _SIZE = 6, 3, 2, 128
_BLOCKS, _BLOCK, _COLUMNS = 4, 16, 16


class _Cached(nn.Module):
    """Attention up to the cache: split, norms, rotation, and the write. single: both are turned by one call."""

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self, *, single: bool) -> None:
        super().__init__()
        for name in ("key_cache", "value_cache"):
            cache = torch.zeros(_BLOCKS, _KV_HEADS * _SIZE // _COLUMNS, _BLOCK, _COLUMNS)
            self.register_buffer(name, cache)
        self.query, self.key = (nn.Parameter(torch.linspace(low, 1.6, _SIZE)) for low in (0.4, 0.7))
        self.single = single

    def forward(self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        ops: Any = torch.ops.npu
        query, key, value = qkv.split([_HEADS * _SIZE, _KV_HEADS * _SIZE, _KV_HEADS * _SIZE], dim=-1)
        query = ops.npu_rms_norm(query.reshape(-1, _HEADS, _SIZE), self.query, 2e-5)[0]
        key = ops.npu_rms_norm(key.reshape(-1, _KV_HEADS, _SIZE), self.key, 2e-5)[0]
        if self.single:
            query, key = query.view(1, -1, _HEADS, _SIZE), key.view(1, -1, _KV_HEADS, _SIZE)
            query, key = ops.npu_apply_rotary_pos_emb(query, key, cos[None], sin[None])
            key = key.view(-1, _KV_HEADS, _SIZE)
        else:
            query, key = (ops.npu_rotary_mul(x, cos, sin) for x in (query, key))
        value = value.contiguous().view(-1, _KV_HEADS, _SIZE)
        ops.npu_scatter_pa_kv_cache(key, value, self.key_cache, self.value_cache, slots, cache_mode="PA_NZ")
        return query.sin(), self.key_cache * 2, self.value_cache.cos()


def cached_heads() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield attention up to the cache, turned by two calls and by one."""
    generator = torch.Generator().manual_seed(9)
    angles = torch.rand(_TOKENS, 1, _SIZE, generator=generator) * 6
    width = (_HEADS + 2 * _KV_HEADS) * _SIZE
    for single in (False, True):
        qkv = torch.randn(_TOKENS, width, generator=generator)
        slots = torch.randperm(_BLOCKS * _BLOCK, generator=generator)[:_TOKENS]
        yield _Cached(single=single), (qkv, angles.cos(), angles.sin(), slots)
