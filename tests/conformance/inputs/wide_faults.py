"""Implementations that are right on rows of up to 8,192 columns, and on up to 2**20 elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.common.ops.declaration import CanonicalOp

COLUMNS, ELEMENTS = 8192, 2**20


def wrong_past_8192_columns(op: CanonicalOp, *args: Any, **options: Any) -> Any:
    """Compute by the reference from arguments that hold zeros past column 8,192, and leave zeros there in results."""
    kept = {name: _cut(value) for name, value in op.bind(args, options).args.items()}
    return torch.utils._pytree.tree_map_only(Tensor, _cut, op.reference(**kept))


def wrong_past_2_to_20(op: CanonicalOp, *args: Any, **options: Any) -> Any:
    """Compute by the reference, and leave zeros beyond element 2**20 of each result."""
    return torch.utils._pytree.tree_map_only(Tensor, _capped, op.reference(*args, **options))


def _cut(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.dim() or value.shape[-1] <= COLUMNS:
        return value
    cut = value.clone()
    cut[..., COLUMNS:] = 0
    return cut


def _capped(value: Tensor) -> Tensor:
    if value.numel() > ELEMENTS:
        value.view(-1)[ELEMENTS:] = 0
    return value
