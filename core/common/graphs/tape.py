"""A tape: recorded calls that can be run again into the same memory, and the memory they allocated.

It stands in for a device's own captured graph: see `core.common.graphs.recorder`.
Legend: a *fresh* storage was allocated during the recording; every other storage belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from core.errors import CaptureError

_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
# Bytes of ones are a NaN in every other floating dtype, and the largest value of an unsigned one.
_POISON_BYTES = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}


class Landing(NamedTuple):
    """An output in memory of its own."""

    #: Its place among the results.
    place: int
    #: The memory to fill.
    storage: torch.UntypedStorage
    #: The layout that a later result must have to fit there.
    geometry: tuple[Any, ...]


class Call(NamedTuple):
    """One recorded call. It owns the containers args and kwargs, so values in them can be replaced."""

    op: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    landings: tuple[Landing, ...]
    #: Whether results are complete only after `wait_tensor`, as with functional collectives.
    asynchronous: bool = False


@dataclass(slots=True, weakref_slot=True, eq=False)
class Tape:
    """The recorded calls, what they allocated, and what is needed to undo the writes of the recording itself.

    `fresh` and `saved` are keyed by the identity of a storage and hold that storage: an address that was freed during
    a recording could come back as another tensor's, and a storage that is resized changes its address.
    """

    calls: list[Call] = field(default_factory=list)
    #: What the calls allocated, one tensor a storage.
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)
    #: Storages that the recording wrote, with their content before.
    saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)
    #: All fresh memory, in bytes; set when the recording ends.
    num_bytes: int = 0

    def save(self, tensor: torch.Tensor) -> None:
        """Keep the content of a storage that is about to be written, unless the recording allocated it."""
        storage = tensor.untyped_storage()
        identity = identify(tensor)
        if identity not in self.fresh and identity not in self.saved:
            self.saved[identity] = (storage, storage.clone())

    def undo_writes(self) -> None:
        """Give every storage that existed before the recording its content back.

        In reverse order, since two storages can share memory (`from_numpy` twice): the content saved first is the
        oldest.
        """
        for storage, content in reversed(self.saved.values()):
            storage.copy_(content)
        self.saved.clear()

    def lands(self, tensor: torch.Tensor) -> bool:
        """Return whether a replay copies a result into the memory of this tensor."""
        identity = identify(tensor)
        return any(landing.storage._cdata == identity for call in self.calls for landing in call.landings)

    def replay(self) -> None:
        """Run every call again on the captured tensors; in-place ops write where they did; other results are copied
        there."""
        for op, args, kwargs, landings, asynchronous in self.calls:
            results = op(*args, **kwargs)
            if landings:
                flat = (results,) if type(results) is torch.Tensor else tree_leaves(results)
                for place, storage, expected in landings:
                    # The copy below would read memory that a collective is still filling.
                    result = torch.ops._c10d_functional.wait_tensor(flat[place]) if asynchronous else flat[place]
                    if geometry(result) != expected:
                        raise CaptureError(
                            f"replay of {op}",
                            found="it gave another shape or layout than while recording",
                            remedy="give it inputs of fixed shape",
                        )
                    # Whole storages at a time: that is exact for any strides.
                    storage.copy_(result.untyped_storage())


def identify(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, unique while something holds that storage."""
    return int(tensor.untyped_storage()._cdata)


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor but its values and its address."""
    nbytes = tensor.untyped_storage().nbytes()
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), nbytes)


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill the whole memory of these tensors with values that can't be mistaken for results."""
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype == torch.bool:
            _whole(tensor, dtype).logical_not_()
        elif dtype in _SIGNED:
            _whole(tensor, dtype).fill_(torch.iinfo(dtype).max)
        else:
            _whole(tensor, torch.uint8).fill_(_POISON_BYTES.get(dtype, 0xFF))


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())
