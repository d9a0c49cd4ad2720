"""Digests of what tensors hold: for the few whose content a pass has read when it made a graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.compilation.cache.graphs import PathOf
from core.compilation.cache.uncacheable import Uncacheable

MAX_BYTES = 1 << 20
"""Of all tensors that one graph's passes have read: more would cost a start what the cache saves."""


def encode_contents(tensors: Sequence[Tensor], path_of: PathOf) -> dict[str, str]:
    """Return the digest of each tensor's content by path; raise `Uncacheable` for too much, or one of no path."""
    found = {}
    if sum(tensor.nbytes for tensor in tensors) > MAX_BYTES:
        raise Uncacheable(f"passes have read the content of {len(tensors)} tensors of more than {MAX_BYTES} bytes")
    for tensor in tensors:
        path = path_of(tensor)
        if path is None:
            raise Uncacheable("a pass has read the content of a tensor that is none of the model's")
        found[path] = digest(tensor)
    return found


def changed_contents(digests: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the paths of the tensors that hold something else now."""
    return [path for path, wanted in digests.items() if digest(tensors[path]) != wanted]


def digest(tensor: Tensor) -> str:
    """Return a digest of every bit of a tensor; waits for the device."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
