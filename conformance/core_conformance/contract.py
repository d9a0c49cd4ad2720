"""What a call must not do beside giving right values: write what it does not declare, share memory, change metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core.common.ops.declaration import CanonicalOp
from core_conformance.trial import Trial


def check_metadata(trial: Trial, name: str, results: Sequence[Any], fakes: Sequence[Any]) -> bool:
    """Require as many results as the fake gives, each with its shape, dtype, device type and strides."""
    if not trial.require(len(results) == len(fakes), f"{name}: {len(results)} results instead of {len(fakes)}"):
        return False
    before = len(trial.failures)
    for index, (result, fake) in enumerate(zip(results, fakes, strict=True)):
        trial.same_metadata(f"{name}, result {index} against the fake", result, fake)
    return len(trial.failures) == before


def check_writes(
    trial: Trial, name: str, mutates: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    """Require that the memory of every argument outside `mutates` holds the bits it held before the call."""
    may_change = {memory(after[key]) for key in mutates if isinstance(after.get(key), Tensor)}
    for key, value in after.items():
        if not isinstance(value, Tensor) or memory(value) in may_change:
            continue
        kept = same_bits(_whole(value), _whole(before[key]))
        trial.require(kept, f"{name}: writes its argument {key!r}, which the schema does not declare")


def check_aliasing(trial: Trial, name: str, results: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Require that no result shares memory with an argument or with another result."""
    tensors = [(index, result) for index, result in enumerate(results) if isinstance(result, Tensor)]
    for index, result in tensors:
        for key, value in arguments.items():
            shared = isinstance(value, Tensor) and overlap(result, value)
            trial.require(not shared, f"{name}: result {index} shares memory with argument {key!r}")
        for other, second in tensors[:index]:
            trial.require(not overlap(result, second), f"{name}: results {other} and {index} share memory")


def unread(op: CanonicalOp, kwargs: Mapping[str, Any], name: str) -> int:
    """Return how many leading blocks of a written argument hold anything, so that nobody may compare them."""
    if op.name not in ("attention", "rotary_attention") or name not in op.mutates:
        return 0
    # Padding tokens write the null block, block 0, several of them one slot: which one stays is not promised.
    page = kwargs["key_cache"].shape[1]
    return int(bool((kwargs["slot_mapping"] < page).any()))


def computed(op: CanonicalOp, kwargs: Mapping[str, Any], name: str) -> Tensor | None:
    """Return which elements of an argument the op computes, on the host; None where it copies what it writes."""
    if (op.name, name) != ("rotary_attention", "key_cache"):
        return None
    cache = kwargs[name]
    found = torch.zeros(cache.shape[:2], dtype=torch.bool)
    found.view(-1)[kwargs["slot_mapping"].cpu()] = True
    return found[:, :, None, None].expand(cache.shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one shape and dtype hold the same bits, those of NaN included."""
    a, b = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(a, b))


def memory(tensor: Tensor) -> int:
    """Return what identifies a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have a byte in common."""
    if memory(one) != memory(other) or not one.numel() or not other.numel():
        return False
    return bool(torch.isin(_offsets(one), _offsets(other)).any())


def _whole(tensor: Tensor) -> Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


def _offsets(tensor: Tensor) -> Tensor:
    """Return which bytes of its storage a tensor occupies."""
    size = tensor.element_size()
    count = tensor.untyped_storage().nbytes() // size
    elements = torch.arange(count).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return (elements.reshape(-1, 1) * size + torch.arange(size)).flatten()
