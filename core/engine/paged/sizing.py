"""Chooses the size of the cache: the requested size, else what sequences need, limited by memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from core.common.graphs.indexing import checked_indices
from core.device import Device
from core.engine.inspect.attention import SIZE, StepTensors, implementation
from core.engine.inspect.past import Asked
from core.engine.models.forward import accepted_arguments
from core.engine.paged.groups import CacheNeeds, CacheSize
from core.engine.paged.past import PagedPast
from core.engine.steps.memory import DEFAULT_FRACTION, EASY, GRAPHS
from core.engine.steps.positions import ServedPositions
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError


def choose_size(needs: CacheNeeds, device: Device, config: EngineConfig, largest_step: Callable[[], int]) -> CacheSize:
    """Return the size of the cache; raise `ModelError` where there is no room for it.

    largest_step: runs the largest step once and returns the bytes that it took meanwhile; called only where it matters.
    """
    most, total = config.memory_fraction or DEFAULT_FRACTION, device.parts.memory().total_bytes
    if config.cache_tokens is not None:
        size = needs.size_for(config.cache_tokens)
        _check(needs, size, total - device.parts.memory().taken_bytes, device)
        return size
    full = needs.full
    if config.memory_fraction is None and full.num_bytes <= EASY * (most * total - device.parts.memory().taken_bytes):
        return full
    reserve = int(GRAPHS * largest_step())
    device.parts.empty_cache()
    budget = int(most * total) - device.parts.memory().taken_bytes - reserve
    most_tokens = needs.size_within(budget)
    if most_tokens is None:
        found = f"{device.name} has {max(budget, 0) / 2**30:.2f} GiB for it"
        raise no_room(needs, needs.size_for(needs.max_len), found)
    return full if config.memory_fraction is None and full.num_bytes <= most_tokens.num_bytes else most_tokens


@torch.no_grad()
@checked_indices()
def step_bytes(
    model: Any,
    device: Device,
    positions: ServedPositions,
    *,
    num_tokens: int,
    num_rows: int,
    asked: Asked,
    max_len: int,
) -> int:
    """Run a step of the most tokens, without its attention, and return the bytes that it took meanwhile.

    asked, max_len: what layers ask of the cache, and the positions of a sequence that an indexer scores at most.
    """
    memory, place = device.parts.memory, device.torch_device
    tokens = torch.zeros((1, num_tokens), dtype=torch.int64, device=place)
    rows = torch.zeros(num_rows, dtype=torch.int64, device=place)
    arguments: dict[str, Any] = {"logits_to_keep": rows} if "logits_to_keep" in accepted_arguments(model) else {}
    device.parts.reset_peak_memory()
    before = memory().used_bytes
    # Indexers compute scores for all positions of a sequence: as many as one block is read again here.
    past = PagedPast(asked, num_blocks=1, block_size=max_len, device=place)
    step = StepTensors(
        block_table=torch.zeros((1, 1), dtype=torch.int32, device=place),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=place),
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32, device=place),
    )
    arguments |= past.arguments(tokens[0], step)
    with implementation(model, SIZE), positions.alone(tokens) as told:
        model(input_ids=tokens, use_cache=False, return_dict=True, **arguments, **told)
    device.parts.synchronize()
    return max(0, memory().peak_bytes - before)


def _check(needs: CacheNeeds, size: CacheSize, free: int, device: Device) -> None:
    if size.num_bytes > free:
        raise no_room(needs, size, f"{device.name} has {max(free, 0) / 2**30:.2f} GiB free for it")


def no_room(needs: CacheNeeds, size: CacheSize, found: str) -> ModelError:
    """Return the error for a cache of this size that does not fit."""
    return ModelError(
        f"a key/value cache of {size.num_bytes / 2**30:.2f} GiB ({size.num_tokens} tokens, one sequence has up to "
        f"{needs.max_len})",
        found=found,
        remedy="lower max_model_len, cache_tokens or max_num_seqs, or raise memory_fraction",
    )
