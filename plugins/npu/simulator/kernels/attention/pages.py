"""Kernels that copy rows out of pages and into them: aclnnGatherPaKvCache and aclnnScatterPaCache."""

from __future__ import annotations

from torch import Tensor

from simulator.bounds import demand
from simulator.kernels.atb.rows import load_pages, stored
from simulator.marshal import kernel


@kernel("aclnnGatherPaKvCache", "TTTTTTTCb")
def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor | None,
    mode: str,
    is_sum: bool,
) -> None:
    """Copy keys and values of sequences out of pages; offsets: tokens before each, in whole pages."""
    demand(mode == "Norm", f"mode {mode} is not simulated")
    load_pages((key_cache, value_cache), table, lengths, offsets, is_sum, (key, value))


@kernel("aclnnScatterPaCache", "TTTTTTC")
def scatter_pa_cache(
    key: Tensor,
    cache: Tensor,
    slots: Tensor,
    compress_lens: Tensor | None,
    compress_offsets: Tensor | None,
    seq_lens: Tensor | None,
    mode: str,
) -> None:
    """Write keys (T, N, D) at their slots."""
    demand(compress_lens is None and compress_offsets is None and seq_lens is None and mode == "Norm", "not simulated")
    demand(key.dtype == cache.dtype, f"keys of {key.dtype} for pages of {cache.dtype}")
    stored(key, cache, slots)
