"""What the paged route gives a model for transformers' cache, where its layers ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.engine.inspect.attention import StepTensors
from core.engine.inspect.past import Asked, IndexedPositions, TokenPositions, visible


class PagedPast:
    """The keys of a model's indexers, in blocks, and the arguments that tell its layers of them and of positions."""

    def __init__(self, asked: Asked, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        """num_blocks, block_size: as of the layers that see all positions."""
        self._asked = asked
        #: (N, P, D) by layer; their addresses never change.
        self.caches: Mapping[int, Tensor] = {
            index: torch.zeros((num_blocks, block_size, each.size), dtype=each.dtype, device=device)
            for index, each in asked.indexers.items()
        }
        self._block_size = block_size

    def arguments(self, position_ids: Tensor, step: StepTensors) -> dict[str, Any]:
        """Return the arguments of the model's forward for a step; none where no layer asks. position_ids: (T,)."""
        if self.caches:
            assert step.block_table is not None
            past = IndexedPositions(position_ids, step, self.caches)
            mask = visible(position_ids, step.block_table.shape[1] * self._block_size)
            return {"past_key_values": past, "attention_mask": mask}
        return {"past_key_values": TokenPositions(position_ids)} if self._asked.positions else {}
