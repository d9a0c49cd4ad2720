"""How layers are grouped by window, and how large a cache becomes."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import pytest
import torch
from torch import nn

from core.device import Device, MemoryInfo
from core.engine.inspect.attention import AttentionLayer
from core.engine.inspect.masks import Reach
from core.engine.paged.groups import MAX_GROUPS, CacheNeeds, LayerGroup, make_groups
from core.engine.paged.sizing import choose_size
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError
from core.host.selection import select_device

GIB = 2**30


def layers(*windows: int, chunked: tuple[bool, ...] = ()) -> dict[nn.Module, AttentionLayer]:
    return {
        nn.Identity(): AttentionLayer(
            path=str(index),
            num_heads=4,
            num_kv_heads=2,
            key_size=8,
            value_size=8,
            reach=Reach(window, side_by_side),
            dtype=torch.float32,
        )
        for index, (window, side_by_side) in enumerate(zip_longest(windows, chunked, fillvalue=False))
    }


def needs(*groups: tuple[int, int], max_len: int = 1024, seqs: int = 8, step: int = 256) -> CacheNeeds:
    """groups: window and bytes of one position."""
    found = [LayerGroup(reach=Reach(window), modules=(), bytes_per_position=size) for window, size in groups]
    return CacheNeeds(groups=found, block_size=16, max_len=max_len, max_num_seqs=seqs, max_step_tokens=step)


def test_layers_of_one_window_are_one_group_and_those_without_come_first() -> None:
    groups = make_groups(layers(64, 0, 64, 0, 64), max_len=1024, block_size=16)
    assert [(group.reach.window, len(group.modules), group.bytes_per_position) for group in groups] == [
        (0, 2, 2 * 128),
        (64, 3, 3 * 128),
    ]


def test_a_window_that_holds_nearly_all_is_none() -> None:
    assert [group.reach.window for group in make_groups(layers(0, 1000, 992), max_len=1024, block_size=16)] == [0]
    assert [group.reach.window for group in make_groups(layers(991), max_len=1024, block_size=16)] == [991]


def test_more_windows_than_groups_share_a_larger_one() -> None:
    groups = make_groups(layers(16, 32, 48, 64, 80, 0), max_len=1024, block_size=16)
    assert len(groups) == MAX_GROUPS
    assert [(group.reach.window, len(group.modules)) for group in groups] == [(0, 1), (80, 1), (64, 1), (48, 3)]


def test_chunks_are_a_group_of_their_own_which_no_other_layer_joins() -> None:
    mixed = layers(64, 64, 0, chunked=(True, False, False))
    groups = make_groups(mixed, max_len=1024, block_size=16)
    assert [group.reach for group in groups] == [Reach(), Reach(64, chunked=True), Reach(64)]
    many = layers(96, 80, 64, 48, 32, chunked=(True, True, True, False, True))
    groups = make_groups(many, max_len=1024, block_size=16)
    assert [(group.reach.window, len(group.modules)) for group in groups] == [(0, 2), (96, 1), (80, 1), (64, 1)]


def test_the_full_size_has_room_for_all_sequences_at_full_length() -> None:
    full = needs((0, 100)).full
    assert full.num_blocks == (1 + 8 * 64,) and full.num_tokens == 8 * 1024
    assert full.num_bytes == (1 + 8 * 64) * 16 * 100


def test_a_window_takes_what_its_sequences_look_back_and_a_step_writes() -> None:
    whole, window = needs((0, 100), (128, 100)).full.num_blocks
    assert whole == 1 + 8 * 64
    assert window == 1 + 8 * (8 + 2) + 2 * 16 + 8  # sequences, two steps, and one block each that is begun


@pytest.mark.parametrize("groups", [((0, 100),), ((0, 100), (128, 700)), ((128, 100),)])
def test_the_size_within_some_memory_is_the_largest_that_fits(groups: tuple[tuple[int, int], ...]) -> None:
    asked = needs(*groups)
    assert asked.size_within(asked.size_for(1024).num_bytes - 1) is None
    for num_bytes in (asked.size_for(1024).num_bytes, 3_000_000, 50_000_000):
        size = asked.size_within(num_bytes)
        assert size is not None and size.num_bytes <= num_bytes
        more = asked.size_for(size.num_tokens + 2 * 16)
        # Windows alone need no more than those of all sequences.
        assert more.num_bytes > num_bytes or size == asked.size_for(10**9)
        assert min(size.num_blocks) > 1024 // 16  # one sequence always has room


def device(total: int, used: int) -> Device:
    found = select_device("cpu")
    memory = MemoryInfo(used_bytes=used, total_bytes=total, peak_bytes=used)
    return replace(found, parts=replace(found.parts, memory=lambda: memory))


def unasked() -> int:
    raise AssertionError("the largest step was run for nothing")


def test_a_cache_that_fits_easily_needs_no_look_at_a_step() -> None:
    asked = needs((0, 1000))
    assert choose_size(asked, device(GIB, 0), EngineConfig(), unasked) == asked.full


def test_what_weights_and_steps_leave_becomes_cache() -> None:
    asked = needs((0, 100_000))  # 0.8 GiB in full
    size = choose_size(asked, device(GIB, GIB // 4), EngineConfig(), lambda: GIB // 10)
    assert size.num_bytes <= 0.9 * GIB - GIB // 4 - 1.5 * (GIB // 10) < asked.size_for(size.num_tokens + 64).num_bytes
    share = EngineConfig(memory_fraction=0.5)
    assert choose_size(asked, device(GIB, GIB // 4), share, lambda: 0).num_bytes <= GIB // 4


def test_a_share_of_memory_may_give_more_than_the_sequences_need() -> None:
    asked = needs((0, 1000))
    size = choose_size(asked, device(GIB, 0), EngineConfig(memory_fraction=0.5), lambda: 0)
    assert asked.full.num_bytes < size.num_bytes <= GIB // 2


def test_a_number_of_tokens_is_what_there_is() -> None:
    asked = needs((0, 1000))
    size = choose_size(asked, device(GIB, 0), EngineConfig(cache_tokens=5000), unasked)
    assert size.num_tokens == 5008
    with pytest.raises(ModelError, match="a key/value cache of"):
        choose_size(asked, device(GIB, GIB - 1000), EngineConfig(cache_tokens=5000), unasked)


def test_one_sequence_must_have_room() -> None:
    with pytest.raises(ModelError, match=r"has 0\.00 GiB for it"):
        choose_size(needs((0, 1_000_000)), device(GIB, GIB - 1), EngineConfig(), lambda: 0)
