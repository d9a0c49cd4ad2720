"""The op that the fusion of query, key, value and cache makes: `npu_qkv_rms_norm_rope_cache` with a result.

torch_npu's op writes the query into memory that it is given, and wants to be told how many tokens there are; here the
query is a result and tokens are counted at each call, so that one graph serves every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch._ops import OpOverload

from core_npu.passes.calls import op

__all__ = ["CACHE_MODE", "qkv_cache_op"]

CACHE_MODE = "PA_NZ"
_NAME = "qkv_rms_norm_rotary_cache"
_SCHEMA = (
    f"{_NAME}(Tensor qkv, Tensor query_weight, Tensor key_weight, Tensor cos, Tensor sin, Tensor slot_mapping, "
    "Tensor(a!) key_cache, Tensor(b!) value_cache, float eps, int[] shape) -> Tensor query"
)


@cache
def qkv_cache_op() -> OpOverload[..., Tensor]:
    """Return the op, defined when first asked for: where no pass makes it, torch need not know it.

    qkv (T, (N + 2 K) D): T tokens, N query and K key heads of D features. query_weight, key_weight (D,). cos, sin: T
    rows of D, of any further dimensions of size 1. slot_mapping (T,) int64, -1 for no slot. key_cache, value_cache
    (blocks, K D / 16, block, 16), written at these slots. shape: of the result, -1 for the tokens, N and D last or N D.
    The result is memory of its own.
    """
    library = _library()
    library.define(_SCHEMA)
    library.impl(_NAME, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{_NAME}", _fake, lib=library)
    found: OpOverload[..., Tensor] = getattr(torch.ops.core_npu, _NAME).default
    return found


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("core_npu", "FRAGMENT")


def _run(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    eps: float,
    shape: Sequence[int],
) -> Tensor:
    size = query_weight.shape[0]
    num_tokens, num_kv_heads = qkv.shape[0], key_cache.shape[1] * key_cache.shape[3] // size
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads * size)
    op("npu_qkv_rms_norm_rope_cache")(
        qkv,
        query_weight,
        key_weight,
        cos.reshape(num_tokens, size),
        sin.reshape(num_tokens, size),
        slot_mapping,
        query,
        key_cache,
        value_cache,
        [num_tokens, 1, num_heads + 2 * num_kv_heads, size],
        [num_heads, num_kv_heads, num_kv_heads],
        epsilon=eps,
        cache_mode=CACHE_MODE,
    )
    return query.view(_sizes(shape, num_tokens))


def _fake(qkv: Tensor, *others: object) -> Tensor:
    shape = others[-1]
    assert isinstance(shape, Sequence)
    return qkv.new_empty(_sizes(shape, qkv.shape[0]))


def _sizes(shape: Sequence[int], num_tokens: int) -> list[int]:
    return [num_tokens if size == -1 else size for size in shape]
