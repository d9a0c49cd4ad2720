"""The block pool and the cache tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from core.engine.inspect.attention import AttentionLayer
from core.engine.inspect.masks import Reach
from core.engine.paged.blocks import NULL_BLOCK, BlockPool
from core.engine.paged.cache import PagedCache
from core.engine.paged.groups import make_groups
from core.errors import ModelError

CPU = torch.device("cpu")


def layer(path: str, key_size: int = 8, value_size: int = 4) -> AttentionLayer:
    return AttentionLayer(
        path=path,
        num_heads=4,
        num_kv_heads=2,
        key_size=key_size,
        value_size=value_size,
        reach=Reach(),
        dtype=torch.float32,
    )


def test_every_block_but_the_null_block_is_handed_out_once() -> None:
    pool = BlockPool(9)
    assert pool.num_free == 8
    taken = pool.take(3) + pool.take(5)
    assert sorted(taken) == list(range(1, 9))
    assert NULL_BLOCK not in taken
    assert pool.num_free == 0


def test_an_exhausted_pool_says_how_many_are_free() -> None:
    pool = BlockPool(4)
    pool.take(2)
    with pytest.raises(ModelError) as caught:
        pool.take(2)
    assert caught.value.asked == "2 more cache blocks"
    assert caught.value.found == "1 of 4 are free"
    assert pool.num_free == 1


def test_blocks_that_come_back_are_handed_out_again() -> None:
    pool = BlockPool(4)
    first = pool.take(3)
    pool.give_back(first)
    assert sorted(pool.take(3)) == sorted(first)


def test_a_cache_hangs_on_its_modules_and_leaves_them() -> None:
    modules = [nn.Identity(), nn.Identity()]
    layers: dict[nn.Module, AttentionLayer] = {modules[0]: layer("a"), modules[1]: layer("b", 16, 16)}
    groups = make_groups(layers, max_len=64, block_size=4)
    cache = PagedCache(layers, groups, num_blocks=[3], block_size=4, device=CPU)
    state = modules[1].__dict__["_core_attention"]
    assert state.key_cache.shape == (3, 4, 2, 16)
    assert modules[0].__dict__["_core_attention"].value_cache.shape == (3, 4, 2, 4)
    assert state.step is cache.steps[0]
    assert cache.num_bytes == 3 * 4 * (layer("a").bytes_per_position + layer("b", 16, 16).bytes_per_position)
    assert not modules[0].state_dict()
    assert copy.deepcopy(modules[1]).__dict__["_core_attention"] is state
    cache.close()
    assert cache.num_bytes == 0
    assert all("_core_attention" not in module.__dict__ for module in modules)
