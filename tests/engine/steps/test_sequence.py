"""A sequence's tokens: which are pending, and where the prompt ends. Its random numbers: tests of sampling."""

from __future__ import annotations

from core.engine.config import SamplingParams
from core.engine.steps.sequence import Sequence


def sequence(prompt: list[int], *, generated: list[int] | None = None, computed: int = 0) -> Sequence:
    return Sequence(0, prompt, SamplingParams(), generated=list(generated or []), num_computed=computed)


def test_pending_is_the_prompt_first_and_then_the_latest_token() -> None:
    seq = sequence([5, 6, 7])
    assert (len(seq), seq.num_pending, seq.in_prompt) == (3, 3, True)
    seq.num_computed = 2
    assert (seq.num_pending, seq.in_prompt) == (1, True)
    seq.num_computed = 3
    assert (seq.num_pending, seq.in_prompt) == (0, False)
    seq.generated.append(8)
    assert (len(seq), seq.num_pending, seq.in_prompt) == (4, 1, False)


def test_tokens_are_read_across_the_end_of_the_prompt_and_zero_where_nobody_knows_them() -> None:
    found = sequence([5, 6, 7], generated=[8, 9])
    assert [found.tokens(0, 2), found.tokens(2, 2), found.tokens(3, 2)] == [[5, 6], [7, 8], [8, 9]]
    found.num_awaited = 1
    assert (len(found), found.num_known, found.tokens(4, 2), found.tokens(5, 1)) == (6, 5, [9, 0], [0])


def test_a_sequence_has_all_once_its_last_token_is_under_way() -> None:
    found = Sequence(0, [5], SamplingParams(max_new_tokens=2), generated=[6])
    assert not found.has_all
    found.num_awaited = 1
    assert found.has_all


def test_sequences_with_equal_tokens_are_not_one() -> None:
    assert sequence([5]) != sequence([5])
