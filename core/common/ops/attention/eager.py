"""`core::attention` where it runs eagerly between graphs: it may read lengths on the host, and computes nothing for
padding. The general reference pads every sequence's queries to the longest; here each sequence attends by itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def by_sequence(
    reference: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    max_query_len: int = 0,
    mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return what `reference` returns, by one call of it per prompt and one for all sequences of a single token.

    Arguments and result as in `core::attention`. Waits for the device once, to read lengths and starts.
    """
    num_seqs, page = seq_lens.shape[0], key_cache.shape[1]
    numbers = torch.cat((seq_lens, query_starts.to(seq_lens.dtype))).tolist()
    lens, starts = numbers[:num_seqs], numbers[num_seqs:]
    counts = [stop - start for start, stop in pairwise(starts)]
    out = query.new_zeros((query.shape[0], query.shape[1], value.shape[2]))

    def attend(rows: Any, sequences: Any, own_starts: Tensor, num_queries: int, length: int) -> None:
        pages = -(-length // page)
        out[rows] = reference(
            query[rows],
            key[rows],
            value[rows],
            key_cache,
            value_cache,
            block_table[sequences, :pages],
            slot_mapping[rows],
            seq_lens[sequences],
            own_starts,
            mask=None if mask is None else mask[rows, :, : pages * page],
            max_query_len=num_queries,
            **options,
        )

    single = [index for index, count in enumerate(counts) if count == 1]
    if single:
        device = query.device
        rows, sequences = (torch.tensor(v, device=device) for v in ([starts[i] for i in single], single))
        own_starts = torch.arange(len(single) + 1, dtype=query_starts.dtype, device=device)
        attend(rows, sequences, own_starts, 1, max(lens[index] for index in single))
    for index, count in enumerate(counts):
        if count > 1:
            own_starts = query_starts[index : index + 2] - query_starts[index]
            attend(slice(starts[index], starts[index + 1]), slice(index, index + 1), own_starts, count, lens[index])
    return out
