"""Places an engine's weights and cache in memory that can be given back while captured graphs stay, or its weights in
memory that is read faster."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from core.device import Device, SleepingMemory
from core.engine.steps.runner import EngineConfig
from core.errors import EngineError, UsageError

log = logging.getLogger("core.engine")
_MOST_FREED = 2**30
"""Bytes freed by moved tensors before the allocator is asked to release them, so that never all weights exist twice."""


class Sleeper:
    """Moves parameters and cache to memory that can sleep, before graphs are captured, and lets it sleep and wake.

    Everything else that graphs read (buffers, tensors that passes made, static inputs, the graphs' own memory) stays
    where it is and keeps its values.
    """

    def __init__(self, model: nn.Module, device: Device, *, sleeps: bool = True) -> None:
        """sleeps: False moves weights alone, to where they are read faster. Raise `UsageError` where the device has no
        memory that can sleep."""
        make = device.parts.sleeping_memory
        if make is None:
            raise UsageError(
                f"an engine that can sleep on {device.name}",
                found="the device has no memory that can be given back while graphs keep its addresses "
                "(DeviceParts.sleeping_memory)",
                remedy="leave sleep_mode out; close the engine and load it again to free its memory",
            )
        self._model = model
        self._device = device
        self.sleeps = sleeps
        self._weights, self._cache = _Part(make()), _Part(make())
        #: Copies of the weights on the host; None if the weights keep their values or need not come back.
        self._backup: list[Tensor] | None = None

    def placing(self, cache: Iterable[Tensor]) -> Callable[[Sequence[Tensor]], None]:
        """Return what moves the weights and these tensors of the cache; for `CompileOptions(relocate=…)`."""
        kept = tuple(cache) if self.sleeps else ()

        def place(constants: Sequence[Tensor]) -> None:
            weights = list(self._model.parameters())
            others = (*constants, *self._model.buffers(), *kept)
            holders = _holders((*weights, *others))
            of_cache = {_memory(tensor) for tensor in kept}
            of_weights = {_memory(tensor) for tensor in weights if _is_plain(tensor)} - of_cache
            for part, memory in ((self._weights, of_weights), (self._cache, of_cache)):
                part.forget_all_but(memory)
                self._move(part, {each: holders[each] for each in memory if each in holders})

        return place

    def sleep(self, *, keep_weights: bool) -> int:
        """Give the memory back, with a copy of the weights on the host if they are to be kept; return the bytes."""
        parts = [self._cache]
        if not keep_weights:
            parts.append(self._weights)
        elif not self._weights.memory.in_host_memory:
            self._backup = [self._on_host(tensor) for tensor in self._weights.tensors]
            parts.append(self._weights)
        self._device.synchronize()
        for part in parts:
            part.release()
        return sum(part.num_bytes for part in parts)

    def wake(self) -> None:
        """Take the memory again, weights as they were if they were kept, the cache zeroed.

        Raises `EngineError`, still asleep, where the device has not enough.
        """
        taken: list[_Part] = []
        try:
            for part in (self._weights, self._cache):
                if part.released:
                    part.restore()
                    taken.append(part)
        except torch.OutOfMemoryError as error:
            for part in taken:
                part.release()
            raise EngineError(
                "wake an engine",
                found=f"{self._device.name} has no room for it: {' '.join(str(error).split())[:200]}",
                remedy="free memory of the device and wake it again; it is still asleep",
            ) from error
        with torch.no_grad():
            for tensor, content in zip(self._weights.tensors, self._backup or (), strict=False):
                tensor.copy_(content)
            for tensor in self._cache.tensors:
                tensor.zero_()
        self._device.synchronize()
        self._backup = None

    def abandon(self) -> None:
        """Release the model while it sleeps: its parameters have no memory, and using one is a clear error."""
        if self._weights.released:
            self._model.to("meta")

    def _on_host(self, tensor: Tensor) -> Tensor:
        pinned = self._device.capabilities.asynchronous
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)

    def _move(self, part: _Part, holders: dict[int, list[Tensor]]) -> None:
        freed, stays = 0, 0
        for memory, tensors in holders.items():
            if part.has(memory):
                continue
            storage = tensors[0].untyped_storage()
            num_bytes = storage.nbytes()
            # One more reference from the storage object used to ask. Any other holder would keep and read the old
            # memory.
            if torch._C._storage_Use_Count(memory) != len(tensors) + 1:
                stays += num_bytes
                continue
            part.take_in(storage, tensors)
            del storage
            freed += num_bytes
            if freed > _MOST_FREED:
                freed = 0
                self._device.parts.empty_cache()
        self._device.parts.empty_cache()
        if stays and self.sleeps:
            log.warning("%d bytes stay in memory while the engine sleeps: others hold them too", stays)


def make_sleeper(model: nn.Module, device: Device, config: EngineConfig) -> Sleeper | None:
    """Return what moves the weights of an engine's model, where it is to sleep or the device places weights better;
    raise as `Sleeper` does."""
    places = device.parts.places_weights and config.draft_model is None  # weights of two models are not told apart
    return Sleeper(model, device, sleeps=config.sleep_mode) if config.sleep_mode or places else None


class _Part:
    """Memory that sleeps and wakes together."""

    def __init__(self, memory: SleepingMemory) -> None:
        self.memory = memory
        #: (bytes,) uint8, one for each storage.
        self.tensors: list[Tensor] = []
        self.released = False

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def has(self, memory: int) -> bool:
        return any(_memory(tensor) == memory for tensor in self.tensors)

    def forget_all_but(self, memory: set[int]) -> None:
        """Drop tensors that are no longer used."""
        self.tensors = [tensor for tensor in self.tensors if _memory(tensor) in memory]

    @torch.no_grad()
    def take_in(self, storage: torch.UntypedStorage, tensors: Sequence[Tensor]) -> None:
        """Move a storage, and with it the tensors that lie there."""
        device = tensors[0].device
        moved = self.memory.allocate(storage.nbytes())
        moved.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
        for tensor in tensors:
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=device).set_(moved.untyped_storage(), *place)
        self.tensors.append(moved)

    def release(self) -> None:
        self.memory.release()
        self.released = True

    def restore(self) -> None:
        self.memory.restore()
        self.released = False


def _holders(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Return the tensors that lie in each storage, with the tensors that they are views of."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        each: Tensor | None = tensor
        while each is not None and _is_plain(each):
            found[id(each)] = each
            each = each._base
    holders: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in found.values():
        if tensor.untyped_storage().nbytes():
            holders[_memory(tensor)].append(tensor)
    return dict(holders)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
