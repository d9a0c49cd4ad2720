"""The attention kernel behind torch.nn.functional.scaled_dot_product_attention.

B batch, N query heads, G heads of keys and values, S queries, L keys, H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.marshal import kernel

# How a mask of fixed size stands for one of any size: 2 keeps the triangle of the first query and key, 3 that of the
# last ones, 4 a band around the latter.
_TRIANGLE_FIRST, _TRIANGLE_LAST, _BAND = 2, 3, 4


def _heads_first(x: Tensor, layout: str, num_heads: int) -> Tensor:
    """Return (B, N, S, H) of a tensor in the named layout, as a view."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout not in ("BSH", "SBH"):
        raise NotImplementedError(f"attention of layout {layout!r}")
    heads: Tensor = x.unflatten(-1, (num_heads, -1))
    return heads.transpose(1, 2) if layout == "BSH" else heads.permute(1, 2, 0, 3)


def allowed(num_queries: int, num_keys: int, mode: int, before: int, after: int) -> Tensor:
    """Return (S, L) of which keys each query may see by `mode` and the band of `before` and `after` tokens."""
    queries = torch.arange(num_queries).unsqueeze(1)
    if mode in (_TRIANGLE_LAST, _BAND):
        queries = queries + num_keys - num_queries
    distance = torch.arange(num_keys).unsqueeze(0) - queries
    if mode in (_TRIANGLE_FIRST, _TRIANGLE_LAST):
        return distance <= 0
    return (distance <= after) & (-distance <= before)


@kernel("aclnnFlashAttentionScore", "TTTTTTTADDIIICIITTTT")
def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shift: Tensor | None,
    drop_mask: Tensor | None,
    padding_mask: Tensor | None,
    mask: Tensor | None,
    prefix: list[int] | None,
    scale: float,
    keep: float,
    before: int,
    after: int,
    num_heads: int,
    layout: str,
    inner_precise: int,
    mode: int,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_out: Tensor,
    out: Tensor,
) -> None:
    if drop_mask is not None or keep != 1 or padding_mask is not None or mode > _BAND:
        raise NotImplementedError(f"attention with dropout, padding masks or sparse mode {mode}")
    q = _heads_first(query, layout, num_heads).float()
    num_kv_heads = key.shape[-1] // q.shape[-1]  # where a layout merges heads with their size; unused elsewhere
    k, v = (_heads_first(x, layout, num_kv_heads).float() for x in (key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2)
    if shift is not None:
        scores = scores + shift.float()
    scores = scores * scale
    visible = allowed(q.shape[2], k.shape[2], mode, before, after)
    if mask is not None and mode in (0, 1):
        visible = (visible if mode == 0 else torch.ones_like(visible)) & ~mask.bool()
    scores = scores.masked_fill(~visible, float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    # A query that sees nothing gives zeros, as torch's own attention has it.
    weights = torch.exp(scores - highest.masked_fill(highest.isinf(), 0))
    total = weights.sum(-1, keepdim=True)
    _heads_first(out, layout, num_heads).copy_((weights @ v) / total.masked_fill(total == 0, 1))
    if softmax_max.numel():
        softmax_max.copy_(highest.expand(softmax_max.shape))
        softmax_sum.copy_(total.expand(softmax_sum.shape))
