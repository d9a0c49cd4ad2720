"""Proofs that a mask may be rebuilt from positions, and refusals of those that may not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core.engine.inspect.masks import EXHAUSTIVE, MaskFunction, Reach, prove_causal


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def window(size: int) -> MaskFunction:
    return lambda batch, head, query, key: (key <= query) & (key > query - size)


def chunked(size: int) -> MaskFunction:
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


def prefix(size: int) -> MaskFunction:
    return lambda batch, head, query, key: (key <= query) | (key < size)


def packed(lengths: list[int]) -> MaskFunction:
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return lambda batch, head, query, key: (key <= query) & (owner[key] == owner[query])


@pytest.mark.parametrize("max_len", [1, 2, 17, 300, EXHAUSTIVE, EXHAUSTIVE + 1, 10_000])
def test_a_causal_mask_is_proven(max_len: int) -> None:
    assert prove_causal(causal, max_len) == (Reach(), "")


@pytest.mark.parametrize(("size", "max_len"), [(1, 8), (8, 64), (63, 64), (512, 2048), (1000, 5000), (4096, 40_000)])
def test_a_window_is_read_off_the_mask(size: int, max_len: int) -> None:
    assert prove_causal(window(size), max_len) == (Reach(size), "")


@pytest.mark.parametrize(
    ("size", "max_len"), [(2, 8), (8, 64), (8, 65), (63, 64), (512, 2048), (1000, 5000), (8192, 40_000)]
)
def test_chunks_are_read_off_the_mask(size: int, max_len: int) -> None:
    assert prove_causal(chunked(size), max_len) == (Reach(size, chunked=True), "")


@pytest.mark.parametrize("max_len", [64, 40_000])
@pytest.mark.parametrize("shift", [-1, 1, 3])
def test_chunks_that_begin_elsewhere_are_refused(shift: int, max_len: int) -> None:
    def shifted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((key + shift) // 8 == (query + shift) // 8)

    proven, reason = prove_causal(shifted, max_len)
    assert proven is None and "it is neither causal nor" in reason


def test_chunks_with_the_last_of_the_one_before_are_refused() -> None:
    def overlapping(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= query // 8 * 8 - 1)

    assert prove_causal(overlapping, 64)[0] is None


@pytest.mark.parametrize(
    ("reach", "first"),
    [(Reach(), [0, 0, 0, 0]), (Reach(4), [0, 0, 1, 5]), (Reach(4, chunked=True), [0, 0, 4, 8])],
    ids=str,
)
def test_the_first_position_that_a_token_sees(reach: Reach, first: list[int]) -> None:
    assert [reach.first_seen(position) for position in (0, 3, 4, 8)] == first


@pytest.mark.parametrize("max_len", [8, 64, 3000])
def test_a_window_that_no_context_reaches_is_none(max_len: int) -> None:
    assert prove_causal(window(max_len), max_len) == (Reach(), "")


@pytest.mark.parametrize("max_len", [64, 5000])
@pytest.mark.parametrize("make", [lambda: packed([20, 4980]), lambda: prefix(5)])
def test_other_masks_are_refused_with_a_place(make: Callable[[], MaskFunction], max_len: int) -> None:
    proven, reason = prove_causal(make(), max_len)
    assert proven is None
    assert "query" in reason and "key" in reason


def test_sequences_packed_far_behind_the_exhaustive_range_are_refused() -> None:
    assert prove_causal(packed([2000, 2990, 10]), 5000)[0] is None
    assert prove_causal(packed([1500, 1499, 2001]), 5000)[0] is None


def test_two_packed_sequences_are_two_chunks_where_the_second_is_no_longer() -> None:
    assert prove_causal(packed([40, 24]), 64) == (Reach(40, chunked=True), "")
    assert prove_causal(packed([20, 44]), 64)[0] is None


def test_a_chunk_as_long_as_the_context_is_causal() -> None:
    assert prove_causal(chunked(64), 64) == (Reach(), "")


def test_a_bidirectional_mask_is_refused() -> None:
    def everything(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.ones((), dtype=torch.bool)

    proven, reason = prove_causal(everything, 32)
    assert proven is None
    assert "query 0, key 1" in reason


def test_one_wrong_pair_is_found_in_a_short_context() -> None:
    def almost(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ~((query == 1234) & (key == 77))

    assert prove_causal(almost, 2048) == (None, "at query 1234, key 77 it is neither causal nor a window of 0")


def test_a_rule_that_changes_behind_the_exhaustive_range_is_found() -> None:
    def long_context(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((query < 4096) | (key >= 4))

    assert prove_causal(long_context, 4096) == (Reach(), "")
    assert prove_causal(long_context, 8192)[0] is None


@pytest.mark.slow
def test_every_row_up_to_the_exhaustive_range_is_compared() -> None:
    def hiding(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ~((query >= 5000) & (query < 5050) & (key < 10))

    def image(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (query >= 3000) & (query < 3100) & (key >= 3000) & (key < 3100)
        return (key <= query) | inside

    start = time.perf_counter()
    proven = prove_causal(causal, 8192)
    seconds = time.perf_counter() - start
    assert proven == (Reach(), "")
    assert seconds < 5  # well below one on an idle host
    assert prove_causal(hiding, 8192) == (None, "at query 5000, key 0 it is neither causal nor a window of 0")
    assert prove_causal(image, 8192) == (None, "at query 3000, key 3001 it is neither causal nor a window of 0")


@pytest.mark.parametrize("max_len", [64, 10_000])
@pytest.mark.parametrize("wide", [0, 1])
def test_a_mask_that_depends_on_the_head_is_refused(wide: int, max_len: int) -> None:
    def narrow_elsewhere(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((head == wide) | (key > query - 4))

    proven, reason = prove_causal(narrow_elsewhere, max_len)
    assert proven is None
    assert "query" in reason and "key" in reason


def test_a_mask_of_the_batch_is_refused() -> None:
    hidden = torch.zeros(1, 64, dtype=torch.bool)

    def padded(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & hidden[batch, key]

    assert prove_causal(padded, 64)[0] is None


def test_a_function_that_fails_is_refused_with_its_error() -> None:
    table = torch.ones(8, dtype=torch.bool)

    def too_short(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & table[key]

    proven, reason = prove_causal(too_short, 64)
    assert proven is None
    assert "can't be evaluated on plain positions: IndexError" in reason


@pytest.mark.parametrize("make", ["causal_mask_function", "sliding_window_causal_mask_function"])
def test_transformers_own_functions_are_proven(make: str) -> None:
    from transformers import masking_utils

    function = getattr(masking_utils, make)
    expected = 0
    if make.startswith("sliding"):
        function, expected = function(12), 12
    assert prove_causal(function, 100) == (Reach(expected), "")


def test_transformers_chunked_function_is_proven_where_no_padding_is_on_the_left() -> None:
    from transformers.masking_utils import chunked_causal_mask_function

    function = chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.long))
    assert prove_causal(function, 100) == (Reach(16, chunked=True), "")
    padded = chunked_causal_mask_function(16, torch.full((1,), 3))
    assert prove_causal(padded, 100)[0] is None


def test_a_function_is_evaluated_where_its_own_tensors_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[object, ...]] = []
    taken = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved.append(args)
        return self if args == ("elsewhere",) else taken(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)
    assert prove_causal(chunked(16), 100, "elsewhere") == (Reach(16, chunked=True), "")
    assert moved.count(("elsewhere",)) % 4 == 0 and moved  # batch, head, query and key
