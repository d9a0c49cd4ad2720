"""Masks for rows of different lengths, made by transformers' own mask functions."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

from torch import Tensor

_IMPLEMENTATIONS = ("sdpa", "eager")
"""transformers' attention implementations whose masks are functions of positions, evaluated on tensors."""
_lock = Lock()
_before: dict[str, Any] = {}
_num_holders = 0


def hold_row_masks() -> None:
    """Let masks be made for a query offset of each row, until `release_row_masks`; other masks do not change.

    transformers knows one offset for a batch, that of its cache. Ours is (B, 1) where rows are the batch. Where N
    rows are packed into one sequence of B tokens, it is (B, N), and each token attends to its own share of the keys.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks

    global _num_holders
    with _lock:
        _num_holders += 1
        if _num_holders == 1:
            _before.update({name: masks._local_mapping.get(name) for name in _IMPLEMENTATIONS})
            for name in _IMPLEMENTATIONS:
                masks[name] = _by_row(masks[name])


def release_row_masks() -> None:
    """Undo one call of `hold_row_masks`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks

    global _num_holders
    with _lock:
        _num_holders -= 1
        if _num_holders:
            return
        for name, before in _before.items():
            if before is None:
                del masks[name]
            else:
                masks[name] = before


def _by_row(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    def make_row_mask(*args: Any, **kwargs: Any) -> Any:
        q_offset, mask_function = kwargs.get("q_offset"), kwargs.get("mask_function")
        if mask_function is None or not isinstance(q_offset, Tensor) or not q_offset.dim():
            return make_mask(*args, **kwargs)
        num_packed = q_offset.shape[1]
        size = kwargs["kv_length"] // num_packed

        def of_row(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return mask_function(batch_idx, head_idx, q_idx + q_offset[batch_idx, 0], kv_idx)

        def of_packed(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            mask = mask_function(batch_idx, head_idx, q_offset[q_idx, 0], kv_idx % size)
            return mask & (kv_idx // size == q_idx)

        # No mask at all would mean that every query is at the end of what its row holds.
        of = {"mask_function": of_row if num_packed == 1 else of_packed, "allow_is_causal_skip": False}
        return make_mask(*args, **{**kwargs, **of, "q_offset": 0})

    return make_row_mask
