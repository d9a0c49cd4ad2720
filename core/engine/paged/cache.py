"""The paged key/value cache: its tensors, and which sequence owns which block."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from core.engine.inspect.attention import AttentionLayer, LayerState, StepTensors, attach, detach
from core.errors import ModelError

NULL_BLOCK = 0


class BlockPool:
    """Hands out cache blocks by number. Block 0 is the null block: padding writes there, no sequence gets it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can still be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks; raise `ModelError` if there are fewer. The caller returns them with `give_back`."""
        if count > len(self._free):
            raise ModelError(
                f"{count} more cache blocks",
                found=f"{len(self._free)} of {self.num_blocks} are free",
                remedy="run fewer or shorter sequences at once, or raise num_blocks",
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks for reuse; their content stays until it is overwritten."""
        self._free.extend(blocks)


class PagedCache:
    """Key and value tensors of every attention layer, (N, P, K, D) and (N, P, K, V), attached to its module.

    scales: of layers whose dtype is one of codes; one that is not there has none. Owned by the engine; addresses never
    change, so captured graphs may hold them.
    """

    def __init__(
        self,
        layers: Mapping[nn.Module, AttentionLayer],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        scales: Mapping[nn.Module, tuple[Tensor | None, Tensor | None]] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.step = StepTensors()
        self._modules = tuple(layers)
        self._tensors: list[Tensor] = []
        for layer in layers.values():
            self._tensors += [
                torch.zeros((num_blocks, block_size, layer.num_kv_heads, size), dtype=layer.dtype, device=device)
                for size in (layer.key_size, layer.value_size)
            ]
        # All of them first: where memory runs out, no module is left with a cache.
        pairs = zip(self._tensors[::2], self._tensors[1::2], strict=True)
        for (module, layer), (key_cache, value_cache) in zip(layers.items(), pairs, strict=True):
            own = (scales or {}).get(module, (None, None))
            attach(module, LayerState(key_cache, value_cache, layer.window, self.step, own))

    @property
    def num_bytes(self) -> int:
        """Device memory of all layers."""
        return sum(t.nbytes for t in self._tensors)

    def close(self) -> None:
        """Detach from the model and free the tensors."""
        for module in self._modules:
            detach(module)
        self._tensors.clear()
