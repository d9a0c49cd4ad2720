"""Results of `npu_fused_infer_attention_score` by layout: the rules of its `infer_output` helpers.

Letters of a layout: B sequences, S tokens of one, T tokens of all, N heads, D features, H = N * D.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["scored", "scored_v2"]

_LAYOUTS: Mapping[str, tuple[str, str]] = {
    "BSH": ("BSH", "BSH"),
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "TND": ("TND", "TND"),
    "NTD": ("NTD", "NTD"),
    "NSD": ("NSD", "NSD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "BSH_BNSD": ("BSH", "BNSD"),
    "BSND_BNSD": ("BSND", "BNSD"),
    "NTD_TND": ("NTD", "TND"),
    "BSH_NBSD": ("BSH", "NBSD"),
    "BSND_NBSD": ("BSND", "NBSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"),
    "TND_NTD": ("TND", "NTD"),
}
"""Name -> layouts of query and result."""

_INT4_IN_INT32 = 8


def scored(
    query: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    quant_scale2: Tensor | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_lse_flag: bool = False,
    query_rope: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention's result and its log-sum, which has no elements unless asked for."""
    if input_layout not in _LAYOUTS:
        raise RuntimeError(
            f"npu_fused_infer_attention_score: input_layout {input_layout!r} is none of {', '.join(_LAYOUTS)}"
        )
    given, wanted = _LAYOUTS[input_layout]
    sizes = dict(zip(given, query.shape, strict=True))
    sizes.setdefault("N", num_heads)
    own = sizes["D"] if "D" in sizes else sizes["H"] // num_heads
    features = _features(value, given, num_key_value_heads or num_heads, paged=block_table is not None)
    if value.dtype == torch.int32:
        features = features * _INT4_IN_INT32
    sizes["D"] = features if features else own
    sizes["H"] = sizes["N"] * sizes["D"]
    dtype = query.dtype
    if quant_scale2 is not None:
        dtype = torch.int8
    elif query.dtype == torch.int8:
        dtype = torch.float16 if query_rope is None else query_rope.dtype
    out = query.new_empty([sizes[letter] for letter in wanted], dtype=dtype)
    sizes.setdefault("B", 1)
    rows = "TN" if "T" in given else "BNS"
    log_sum = [*(sizes[letter] for letter in rows), 1] if softmax_lse_flag else [0]
    return out, query.new_empty(log_sum, dtype=torch.float32)


def scored_v2(
    query: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    quant_scale_out: Tensor | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    return_softmax_lse: bool = False,
    query_rope: Tensor | None = None,
    **dtypes: Any,
) -> tuple[Tensor, Tensor]:
    """Do what `scored` does, under the names of the op's second version. dtypes: numbers; raises where one is given."""
    given = {name: number for name, number in dtypes.items() if number is not None}
    if given:
        raise RuntimeError(
            f"npu_fused_infer_attention_score_v2: {', '.join(given)} given, and its fake knows the tensors' own dtypes"
        )
    return scored(
        query,
        value,
        input_layout=input_layout,
        quant_scale2=quant_scale_out,
        block_table=block_table,
        num_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
        softmax_lse_flag=return_softmax_lse,
        query_rope=query_rope,
    )


def _features(value: Tensor, layout: str, heads: int, *, paged: bool) -> Any:
    """Return the head size of values. Pages have it by their rank: (N, P, H), (N, K, P, D), or D in blocks."""
    if paged:
        by_rank = {3: lambda: value.shape[2] // heads, 4: lambda: value.shape[3]}
        by_rank[5] = lambda: value.shape[2] * value.shape[4]
        if value.dim() not in by_rank:
            raise RuntimeError(f"npu_fused_infer_attention_score: a paged value has rank 3 to 5, not {value.dim()}")
        return by_rank[value.dim()]()
    return value.shape[2] // heads if layout == "BSH" else value.shape[-1]
