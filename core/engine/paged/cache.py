"""The paged key/value cache: its tensors, attached to the attention modules that read and write them; and, in slots
beside it, the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from core.engine.inspect.attention import AttentionLayer, LayerState, StepTensors, attach, detach
from core.engine.inspect.past import Asked
from core.engine.inspect.positions import ZERO_BASED, Counting
from core.engine.inspect.recurrence import NONE, Recurrence
from core.engine.paged.groups import LayerGroup
from core.engine.paged.past import PagedPast
from core.engine.paged.recurrent import RecurrentStates
from core.engine.steps.positions import ServedPositions


class PagedCache:
    """Key and value tensors of every attention layer, (N, P, K, D) and (N, P, K, V), attached to its module; and the
    states of recurrent layers.

    The engine owns them. Their addresses never change, so captured graphs may hold them.
    num_blocks: N of each group's layers. scales: of the keys and the values of a layer that holds codes; a layer that
    is left out has none. num_slots: for recurrent states of sequences. asked: what layers ask of transformers' cache.
    """

    def __init__(
        self,
        layers: Mapping[nn.Module, AttentionLayer],
        groups: Sequence[LayerGroup],
        *,
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
        scales: Mapping[nn.Module, tuple[Tensor | None, Tensor | None]] | None = None,
        recurrence: Recurrence = NONE,
        num_slots: int = 0,
        counting: Counting = ZERO_BASED,
        asked: Asked | None = None,
    ) -> None:
        #: What the layers of each group are given in the step that runs.
        self.steps = tuple(StepTensors() for _ in groups)
        self._modules = tuple(layers)
        self._tensors: list[Tensor] = []
        states: dict[nn.Module, LayerState] = {}
        for group, count, step in zip(groups, num_blocks, self.steps, strict=True):
            for module in group.modules:
                layer = layers[module]
                keys, values = (
                    torch.zeros((count, block_size, layer.num_kv_heads, size), dtype=layer.dtype, device=device)
                    for size in (layer.key_size, layer.value_size)
                )
                self._tensors += [keys, values]
                own = (scales or {}).get(module, (None, None))
                states[module] = LayerState(keys, values, layer.reach, step, *own)
        #: What the layers get for transformers' cache, with the keys of indexers, which are of the first group.
        self.past = PagedPast(asked or Asked(), num_blocks=num_blocks[0], block_size=block_size, device=device)
        # Allocated all before any is attached: where memory runs out, no module keeps a cache.
        self.recurrent = RecurrentStates(recurrence, num_slots=num_slots, device=device)
        #: How the model is given the positions of a step.
        self.positions = ServedPositions(counting)
        self.positions.attach()
        for module, state in states.items():
            attach(module, state)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values of all layers, keys of indexers, and recurrent states."""
        return (*self._tensors, *self.past.caches.values(), *self.recurrent.tensors)

    @property
    def num_bytes(self) -> int:
        """Device memory of all layers."""
        return sum(t.nbytes for t in self.tensors)

    def clear_step(self) -> None:
        """Forget the step that ran."""
        for step in self.steps:
            step.clear()
        self.positions.clear()
        self.recurrent.clear()

    def close(self) -> None:
        """Detach from the model and free the tensors."""
        for module in self._modules:
            detach(module)
        self.positions.detach()
        self.recurrent.close()
        self.past.caches = {}
        self._tensors.clear()
