"""Blocks of sequences: shared where they begin alike, kept by content after their end, given back before windows."""

from __future__ import annotations

import pytest

from core.engine.config import SamplingParams
from core.engine.inspect.masks import ALL, Reach
from core.engine.paged.blocks import BlockPool
from core.engine.paged.tables import BlockTables
from core.engine.steps.sequence import Sequence

SIZE = 4


def tables(*num_blocks: int, windows: tuple[int | Reach, ...] = (0,), share: bool = True) -> BlockTables:
    reaches = [each if isinstance(each, Reach) else Reach(each) for each in windows]
    return BlockTables([BlockPool(count) for count in num_blocks], reaches, block_size=SIZE, share_prefixes=share)


def new(index: int, prompt: list[int], *, salt: bytes = b"", max_new_tokens: int = 4) -> Sequence:
    return Sequence(index, prompt, SamplingParams(max_new_tokens=max_new_tokens), cache_salt=salt)


def computed(cache: BlockTables, sequence: Sequence, num_tokens: int | None = None) -> Sequence:
    """Join and compute, as the engine does in one step."""
    assert cache.join(sequence)
    count = len(sequence) if num_tokens is None else num_tokens
    assert cache.grow(sequence, count)
    sequence.num_computed = sequence.num_settled = count
    cache.settle(sequence)
    return sequence


def test_a_sequence_shares_the_full_blocks_that_begin_alike() -> None:
    cache = tables(20)
    first = computed(cache, new(0, list(range(11))))
    second = new(1, [*range(10), 99, 98])
    assert cache.join(second)
    assert (second.num_computed, second.num_reused, second.num_settled) == (8, 8, 8)
    assert second.tables[0][:2] == first.tables[0][:2] and second.tables[0][2] != first.tables[0][2]
    assert cache.pools[0].num_free == 19 - 4
    cache.release(first)
    assert cache.pools[0].num_free == 19 - 3  # the second still holds what they share


@pytest.mark.parametrize("chunk", [11, 5])
def test_what_looks_ahead_is_shared_up_to_the_token_behind(chunk: int) -> None:
    cache = BlockTables([BlockPool(20)], (ALL,), block_size=SIZE, looks_ahead=True)
    first = computed(cache, new(0, list(range(12))), chunk)
    first.num_computed = first.num_settled = 11
    cache.settle(first)
    for index, (other, reused) in enumerate({99: 4, 8: 8}.items(), start=1):
        sequence = new(index, [*range(8), other, 98])
        assert cache.join(sequence) and sequence.num_reused == reused
    another = new(3, [50, *range(1, 12)])
    assert cache.join(another) and another.num_reused == 0


def test_at_least_one_token_is_left_to_be_computed() -> None:
    cache = tables(20)
    computed(cache, new(0, list(range(8))))
    again = new(1, list(range(8)))
    assert cache.join(again)
    assert again.num_computed == 4 and again.num_pending == 4


def test_what_a_sequence_left_is_found_until_its_blocks_are_needed() -> None:
    cache = tables(5)
    cache.release(computed(cache, new(0, list(range(8)))))
    assert cache.pools[0].num_free == 4
    again = new(1, list(range(9)))
    assert cache.join(again) and again.num_reused == 8
    cache.release(again)
    other = computed(cache, new(2, list(range(50, 66))))  # takes all four
    cache.release(other)
    once_more = new(3, list(range(9)))
    assert cache.join(once_more) and once_more.num_reused == 0


def test_blocks_without_content_go_first_and_the_beginning_of_a_text_goes_last() -> None:
    cache = tables(6)
    cache.release(computed(cache, new(0, list(range(14)))))  # three full blocks and a part of one
    cache.release(computed(cache, new(1, list(range(100, 112)))))  # two that hold nothing, and the third of the first
    again = new(2, list(range(14)))
    assert cache.join(again) and again.num_reused == 8


@pytest.mark.parametrize(
    ("prompt", "salt"), [([9, *range(1, 9)], b""), ([0, 1, 2, 9, 4, 5, 6, 7, 8], b""), (list(range(9)), b"other")]
)
def test_another_token_or_salt_shares_nothing_behind_it(prompt: list[int], salt: bytes) -> None:
    cache = tables(20)
    computed(cache, new(0, list(range(9))))
    other = new(1, prompt, salt=salt)
    assert cache.join(other)
    assert other.num_reused == 0


def test_a_block_that_no_step_has_settled_is_not_shared() -> None:
    cache = tables(20)
    first = new(0, list(range(9)))
    assert cache.join(first) and cache.grow(first, 9)
    first.num_computed = 9  # a step is under way
    second = new(1, list(range(9)))
    assert cache.join(second) and second.num_reused == 0


def test_nothing_is_shared_where_that_is_switched_off_or_after_new_weights() -> None:
    cache = tables(20, share=False)
    computed(cache, new(0, list(range(9))))
    second = new(1, list(range(9)))
    assert cache.join(second) and second.num_reused == 0
    cache = tables(20)
    computed(cache, new(0, list(range(9))))
    cache.forget()
    second = new(1, list(range(9)))
    assert cache.join(second) and second.num_reused == 0


def test_generated_tokens_are_shared_too() -> None:
    cache = tables(20)
    first = computed(cache, new(0, [1, 2, 3]))
    for token in (4, 5, 6):
        first.generated.append(token)
        assert cache.grow(first, len(first))
        first.num_computed = first.num_settled = len(first)
        cache.settle(first)
    second = new(1, [1, 2, 3, 4, 5])
    assert cache.join(second) and second.num_reused == 4


def test_a_window_keeps_its_blocks_alone() -> None:
    cache = tables(20, 20, windows=(0, 6))
    each = computed(cache, new(0, list(range(16))), 8)
    assert [sum(block > 0 for block in table) for table in each.tables] == [4, 2]
    each.num_computed = each.num_settled = 8
    assert cache.grow(each, 16)
    each.num_computed = each.num_settled = 15
    cache.settle(each)  # position 15 looks back to 10, which lies in the third block
    assert [[block > 0 for block in table] for table in each.tables] == [[True] * 4, [False, False, True, True]]
    assert [pool.num_free for pool in cache.pools] == [15, 17]
    cache.release(each)
    assert [pool.num_free for pool in cache.pools] == [19, 19]


def test_a_chunk_keeps_its_blocks_until_it_ends() -> None:
    cache = tables(20, 20, windows=(0, Reach(6, chunked=True)))
    each = computed(cache, new(0, list(range(16))), 11)
    # Position 11 sees its chunk from 6 on, which the second block of four begins.
    assert [[block > 0 for block in table] for table in each.tables][1] == [False, True, True]
    each.num_computed = each.num_settled = 12
    cache.settle(each)
    assert [[block > 0 for block in table] for table in each.tables][1] == [False] * 3
    again = new(1, list(range(16)))
    assert cache.join(again) and again.num_reused == 12


def test_a_beginning_that_ends_within_a_chunk_needs_its_blocks() -> None:
    cache = tables(20, 20, windows=(0, Reach(8, chunked=True)))
    first = computed(cache, new(0, list(range(14))))
    again = new(1, list(range(14)))
    assert cache.join(again) and again.num_reused == 12
    assert again.tables[1][:2] == [0, 0] and again.tables[1][2] == first.tables[1][2] > 0


def test_a_beginning_is_shared_where_its_windows_end_is_still_there() -> None:
    cache = tables(20, 4, windows=(0, 4))
    first = computed(cache, new(0, list(range(9))))
    cache.release(first)
    again = new(1, list(range(9)))
    assert cache.join(again)
    assert again.num_reused == 8 and again.tables[1][0] == 0 and again.tables[1][1] > 0
    cache.release(again)
    other = new(2, list(range(60, 72)))
    assert cache.join(other) and cache.grow(other, 12)  # takes all blocks of the window
    once_more = new(3, list(range(9)))
    cache.release(other)
    assert cache.join(once_more)
    assert once_more.num_reused == 0


def test_a_pool_that_may_run_out_keeps_some_blocks_for_those_who_run() -> None:
    cache = tables(301)
    first = new(0, list(range(4)), max_new_tokens=1100)
    assert cache.join(first)
    filler = new(1, list(range(4 * 297)), max_new_tokens=4)
    assert not cache.join(filler)  # 2 of the 299 that are free would be left, and 3 are kept
    assert cache.join(new(2, list(range(4 * 295)), max_new_tokens=4))
