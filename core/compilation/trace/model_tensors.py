"""The parameters and buffers that a callable reaches, for who traces it or checks where its weights lie; digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def content_digest(tensor: torch.Tensor) -> str:
    """Return a digest of every bit of a tensor; waits for the device."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def model_tensors(model: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every parameter and buffer that a callable reaches."""
    seen: set[int] = set()
    for root in _roots(model):
        for name, module in root.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for registry in (module._parameters, module._buffers):
                for key, tensor in registry.items():
                    if tensor is not None:
                        yield ".".join(part for part in (name, key) if part), tensor


def _roots(model: Any) -> Iterator[nn.Module]:
    """Yield the model, or what a function closes over or a callable object holds."""
    if isinstance(model, nn.Module):
        yield model
        return
    held = [cell.cell_contents for cell in getattr(model, "__closure__", None) or () if _filled(cell)]
    held += [getattr(model, "__self__", None), *getattr(model, "__dict__", {}).values()]
    yield from (item for item in held if isinstance(item, nn.Module))


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
