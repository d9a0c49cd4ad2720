"""A graph backend that observes: it wraps the device's own and keeps captured callables, to run them uncaptured too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from core.common.graphs.backend import BoundCallable, Callback, GraphBackend, GraphKey
from core.device import Device


@dataclass(slots=True, eq=False)
class Record:
    """The record of the witnesses."""

    #: Whether to run the callables themselves instead of their graphs.
    uncaptured: bool = False
    #: The captured callables, by key.
    callables: dict[GraphKey, BoundCallable] = field(default_factory=dict)
    #: Calls of `replay` by key, parts included.
    replays: Counter[GraphKey] = field(default_factory=Counter)
    #: Keys whose Python ran in the course of a replay.
    called: Counter[GraphKey] = field(default_factory=Counter)
    #: Memory of static inputs and outputs, held weakly.
    storages: list[StorageWeakRef] = field(default_factory=list)
    replaying: bool = False

    def keep(self, tensors: Any) -> None:
        """Note the memory of these tensors."""
        self.storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    @property
    def alive(self) -> int:
        """How many of the noted storages something still holds."""
        return sum(not storage.expired() for storage in self.storages)


class Witness:
    """Forwards everything to a backend, optional methods (segments, updates) included."""

    def __init__(self, backend: GraphBackend, record: Record) -> None:
        self._backend = backend
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def capture_one(
        self, key: GraphKey, fn: BoundCallable, inputs: Mapping[str, Tensor], after_warmup: Callback
    ) -> tuple[Tensor, ...]:
        """Capture by the backend, and keep the callable."""
        record = self._record

        def watched() -> tuple[Tensor, ...]:
            if record.replaying:
                record.called[key] += 1
            return fn()

        outputs = self._backend.capture_one(key, watched, inputs, after_warmup)
        record.callables[key] = fn
        record.keep([*inputs.values(), *outputs])
        return outputs

    def replay(self, key: GraphKey, step: object = None) -> tuple[Tensor, ...]:
        """Replay by the backend, or run the callable where the record asks for that and the key is a whole one."""
        record = self._record
        if record.uncaptured and key in record.callables:
            return record.callables[key]()
        record.replays[key] += 1
        record.replaying = True
        try:
            return self._backend.replay(key, step)
        finally:
            record.replaying = False

    def cleanup(self) -> None:
        """Drop the callables and have the backend drop its graphs."""
        self._record.callables.clear()
        self._backend.cleanup()


def watched(device: Device, record: Record) -> Device:
    """Return the device with witnesses around its graph backends."""
    factory = device.graph_backend

    def make() -> GraphBackend:
        witness: Any = Witness(factory(), record)  # other methods are the backend's own
        return witness  # type: ignore[no-any-return]

    return replace(device, graph_backend=make)
