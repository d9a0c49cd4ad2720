"""Cache blocks of the models that compute the same sequences: the one that is served, and one that drafts for it.

The groups of all models stand side by side in one set of block tables. So a sequence joins, grows, shares a beginning
and gives its cache back for all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from core.device import Device
from core.engine.heads.states import HiddenStates
from core.engine.lora.memory import AdapterMemory
from core.engine.paged.blocks import FIRST_SLOT, BlockPool
from core.engine.paged.cache import PagedCache
from core.engine.paged.groups import CacheNeeds
from core.engine.paged.model import PagedModel
from core.engine.paged.sizing import choose_size, no_room
from core.engine.paged.tables import BlockTables
from core.engine.parallel.agreement import agree
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError


class Room:
    """How many blocks each model's groups have, and which of them each sequence holds."""

    def __init__(
        self,
        models: Sequence[PagedModel],
        device: Device,
        config: EngineConfig,
        *,
        max_model_len: int,
        looks_ahead: bool = False,
    ) -> None:
        """Choose the size; raise `ModelError` where there is no room for it. Allocates nothing for good.

        looks_ahead: as of `BlockTables`.
        """
        self._models = tuple(models)
        self._device = device
        groups = [group for each in models for group in each.groups]
        self._needs = CacheNeeds(
            groups=groups,
            block_size=config.block_size,
            max_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=max(each.max_step_tokens for each in models),
            fixed_bytes=sum((FIRST_SLOT + each.num_slots) * each.recurrence.bytes_per_sequence for each in models),
        )
        self._size = choose_size(self._needs, device, config, lambda: sum(each.step_bytes() for each in self._models))
        agree("the cache", lambda: {"blocks of each group": list(self._size.num_blocks)})
        slots = [each.num_slots for each in models if each.recurrence.layers]
        self.tables = BlockTables(
            [BlockPool(count) for count in self._size.num_blocks],
            [group.reach for group in groups],
            block_size=config.block_size,
            share_prefixes=config.prefix_caching and not slots,
            looks_ahead=looks_ahead,
            num_slots=min(slots, default=None),
        )

    def groups_of(self, model: PagedModel) -> slice:
        """Return which groups of the block tables are this model's."""
        ends = list(accumulate(len(each.groups) for each in self._models))
        end = ends[self._models.index(model)]
        return slice(end - len(model.groups), end)

    def make_cache(self, model: PagedModel) -> PagedCache:
        """Allocate a model's cache and attach it; raise `ModelError` where memory runs out."""
        try:
            return PagedCache(
                model.layers,
                model.groups,
                num_blocks=self._size.num_blocks[self.groups_of(model)],
                block_size=self._needs.block_size,
                device=self._device.torch_device,
                scales=model.scales,
                recurrence=model.recurrence,
                num_slots=model.num_slots,
                counting=model.counting,
                asked=model.asked,
            )
        except torch.OutOfMemoryError as error:
            raise self._no_room(error) from None

    def make_states(self, model: PagedModel, size: int, dtype: torch.dtype) -> HiddenStates:
        """Allocate hidden states of this size for the slots of a model's first group; raise as `make_cache` does."""
        num_slots = self._size.num_blocks[self.groups_of(model).start] * self._needs.block_size
        try:
            return HiddenStates(torch.zeros((num_slots, size), dtype=dtype, device=self._device.torch_device))
        except torch.OutOfMemoryError as error:
            raise self._no_room(error) from None

    def _no_room(self, error: BaseException) -> ModelError:
        # What other processes hold, `memory` may not know.
        return no_room(self._needs, self._size, " ".join(str(error).split())[:200])


class Place(NamedTuple):
    """A model, and the room in which its cache lies."""

    model: PagedModel
    room: Room
    #: Whether it drafts, and verifies nothing.
    drafts: bool = False
    #: What a head reads in the slots of its first group, which follows the groups of the model that writes it.
    states: HiddenStates | None = None
    adapters: AdapterMemory | None = None

    @classmethod
    def alone(cls, model: Any, device: Device, config: EngineConfig, *, max_model_len: int) -> Place:
        """Inspect a model, and size a cache for it alone beside its adapters, if it may have some."""
        paged, adapters = PagedModel(model, device, config, max_model_len=max_model_len), None
        if config.max_loras:
            adapters = AdapterMemory(model, device.torch_device, config.max_loras, config.max_lora_rank, device.ops)
        return cls(paged, Room([paged], device, config, max_model_len=max_model_len), adapters=adapters)
