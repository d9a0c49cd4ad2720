"""Drafting from the sequence's own text, and which drafts count."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine.steps.speculation import LONGEST, Ngrams, accept


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1]),  # what followed the same three tokens
        ([1, 2, 9, 7, 8, 9, 3, 4, 5, 8, 9], [3, 4, 5]),  # only the last two occurred before
        ([7, 1, 5, 6, 4, 7], [1, 5, 6]),  # only the last one
        ([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3], [5, 6, 1]),  # the latest of two occurrences
        ([9, 2, 3, 4, 8, 3, 6, 7, 1, 9, 2, 3], [4, 8, 3]),  # a longer run before a later, shorter one
        ([1, 2, 3, 4], []),
        ([1], []),
        ([5, 5], [5, 5, 5]),  # the end is read on in the drafts
        ([8, 1, 2, 1, 2], [1, 2, 1]),
    ],
)
def test_the_continuation_of_the_latest_earlier_occurrence_is_proposed(tokens: list[int], drafts: list[int]) -> None:
    assert Ngrams().propose(tokens, 3) == drafts
    assert Ngrams().propose(tokens, 1) == drafts[:1]
    assert Ngrams().propose(tokens, 0) == []


def slow(tokens: list[int], count: int) -> list[int]:
    """The definition, by search."""
    for length in range(min(LONGEST, len(tokens)), 0, -1):
        run = tokens[-length:]
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == run]
        if ends:
            text = list(tokens)
            for offset in range(count):
                text.append(text[ends[-1] + offset])
            return text[len(tokens) :]
    return []


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), max_size=12))
def test_growing_with_the_sequence_is_the_same_as_searching_it(tokens: list[int], steps: list[int]) -> None:
    ngrams, known = Ngrams(), 1
    for step in steps:
        known = min(known + step, len(tokens))
        assert ngrams.propose(tokens[:known], 4) == slow(tokens[:known], 4)


@pytest.mark.parametrize(
    ("drafts", "tokens", "kept"),
    [
        ([], [4], [4]),
        ([4], [4, 5], [4, 5]),
        ([4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7]),
        ([4, 5, 6], [4, 9, 6, 7], [4, 9]),  # what follows a wrong draft was computed behind another text
        ([4, 5, 6], [9, 5, 6, 7], [9]),
    ],
)
def test_tokens_count_up_to_the_first_wrong_draft(drafts: list[int], tokens: list[int], kept: list[int]) -> None:
    assert accept(drafts, tokens) == kept
