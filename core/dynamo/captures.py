"""Captures of a backend's graphs: each shape in a graph of the device, over static copies of what is no weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.capture.runner import GraphRunner
from core.compilation.phases.phase import with_values
from core.errors import CoreError, one_line

if TYPE_CHECKING:
    from core.device import Device
    from core.dynamo.arguments import Arguments
    from core.dynamo.report import GraphAccount

Run = Callable[..., Sequence[Tensor]]
_MAX_CAPTURES = 64
"""Shapes of one graph that are captured, so that memory stays bounded."""


class Captures:
    """The captured shapes of one graph."""

    def __init__(self, device: Device, account: GraphAccount) -> None:
        self._device = device
        self._account = account
        self._runner = GraphRunner(device, device.graph_backend())
        self._lock = RLock()

    def capture(self, lowered: Run, values: tuple[Any, ...], arguments: Arguments) -> Run | None:
        """Return what replays a lowered graph for arguments of these shapes; None, with a note, where it can't be.

        values: the arguments of the first call, then what passes added.
        """
        why = self._refusal(arguments)
        if why:
            self._account.note(f"not captured: {why}")
            return None
        kept = {*arguments.weights, *range(len(arguments.nodes), len(values))}
        static = [
            value if i in kept or not isinstance(value, Tensor) else _copy(value) for i, value in enumerate(values)
        ]
        key = GraphKey("torch.compile", (self._account.num_captured,))
        written = [(static[i], static[i].clone()) for i in arguments.written]

        def restore() -> None:
            for tensor, before in written:
                tensor.copy_(before)

        buffers = {arguments.nodes[i].name: static[i] for i in arguments.copied(values)}
        try:
            with torch.inference_mode(False), self._runner.capture_session():
                self._runner.capture(key, with_values(partial(_flat, lowered), tuple(static)), buffers, reset=restore)
        except CoreError as error:
            self._account.note(f"not captured: {one_line(str(error))}")
            return None
        self._account.num_captured += 1
        return _Replay(self._runner, key, lowered, static, arguments, self._lock)

    def _refusal(self, arguments: Arguments) -> str:
        if self._account.num_captured >= _MAX_CAPTURES:
            return f"more than {_MAX_CAPTURES} shapes"
        unkept = [arguments.nodes[i].name for i in arguments.written if i not in arguments.weights]
        if unkept:
            return f"it writes into {', '.join(unkept)}, which are not at one address at all calls"
        if arguments.returned:
            names = ", ".join(arguments.nodes[i].name for i in arguments.returned)
            return f"it returns views of its inputs: {names}"
        return ""


class _Replay:
    """Replays one captured shape: copies inputs in, and what the graph returns out."""

    def __init__(
        self,
        runner: GraphRunner,
        key: GraphKey,
        lowered: Run,
        static: Sequence[Any],
        arguments: Arguments,
        lock: Any,
    ) -> None:
        self._runner, self._key, self._lowered, self._lock = runner, key, lowered, lock
        self._copies = [(i, static[i]) for i in arguments.copied(static)]
        self._weights = [(i, static[i].data_ptr()) for i in arguments.weights]
        self._fixed = [(i, static[i]) for i in range(len(arguments.nodes)) if not isinstance(static[i], Tensor)]

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        if any(args[i].data_ptr() != address for i, address in self._weights):
            return self._lowered(*args)  # other weights than those at capture
        with self._lock:
            for i, buffer in self._copies:
                buffer.copy_(args[i])
            # Copies: the graph's next replay writes over what it returns.
            return tuple(output.clone() for output in self._runner.replay(self._key))


def _flat(lowered: Run, *args: Any) -> tuple[Tensor, ...]:
    return tuple(lowered(*args))


def _copy(value: Tensor) -> Tensor:
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)
