"""Level 0, memory that can sleep: addresses stay while it is given back, and nothing is mixed up when it is back."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from core_conformance.case import Case
from core_conformance.cases.host.presence import present
from core_conformance.dtypes import working_dtype
from core_conformance.trial import NotSupported, Trial

_SIZES = (1, 300, 2**16, 5 * 2**20 + 7)
"""Bytes of the tensors, some of them no whole pages."""
_NUMBERED = tuple(enumerate(_SIZES))


def sleeping_memory(trial: Trial) -> None:
    """Allocate, give back and restore twice; tensors keep their addresses, and one that dies meanwhile is no matter."""
    device = present(trial)
    make = device.parts.sleeping_memory
    if make is None:
        raise NotSupported("the device brings no memory that can sleep")
    memory, other = make(), make()
    dies = memory.allocate(2**20)
    tensors, untouched = [memory.allocate(size) for size in _SIZES], other.allocate(2**20)
    _check_tensors(trial, tensors, device.torch_device)
    addresses = [tensor.data_ptr() for tensor in tensors]
    untouched.fill_(7)
    for turn in ("first", "second"):
        for value, tensor in enumerate(tensors):
            tensor.fill_(value)
        device.synchronize()
        memory.release()
        if turn == "first":
            del dies
        memory.restore()
        trial.require([each.data_ptr() for each in tensors] == addresses, f"addresses have changed, {turn} time")
        contents = [(torch.arange(size) + 10 * number).remainder(251).to(torch.uint8) for number, size in _NUMBERED]
        for tensor, content in zip(tensors, contents, strict=True):
            tensor.copy_(content)
        for tensor, content in zip(tensors, contents, strict=True):
            trial.same(f"{tensor.numel()} bytes written after waking, {turn} time", tensor.cpu(), content)
    trial.same("memory that was not released", untouched.cpu(), torch.full((2**20,), 7, dtype=torch.uint8))
    dtype = working_dtype(device)
    whole = torch.empty(0, dtype=dtype, device=device.torch_device).set_(
        tensors[2].untyped_storage(), 0, (64, 64), (64, 1)
    )
    whole.fill_(1)
    del memory
    trial.same("a product in it", (whole @ whole).cpu().double(), torch.full((64, 64), 64.0).double())


def _check_tensors(trial: Trial, tensors: list[Tensor], place: torch.device) -> None:
    for tensor, size in zip(tensors, _SIZES, strict=True):
        found = f"allocate({size}) gave {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        trial.require((tuple(tensor.shape), tensor.dtype, tensor.device) == ((size,), torch.uint8, place), found)
        trial.require(
            tensor.untyped_storage().nbytes() == size and tensor.storage_offset() == 0,
            f"allocate({size}) gave a part of a storage of {tensor.untyped_storage().nbytes()} bytes",
        )
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in tensors)
    apart = all(before[1] <= after[0] for before, after in pairwise(spans))
    trial.require(apart, "two tensors lie in the same memory")


SLEEPING_CASES: tuple[Case, ...] = (
    Case(id="host/sleeping-memory", what="memory that sleeps wakes at its addresses, and holds", run=sleeping_memory),
)
