"""A sequence's tokens: which are pending, and where the prompt ends. Its random numbers: tests of sampling."""

from __future__ import annotations

from core.engine.config import SamplingParams
from core.engine.steps.sequence import Sequence


def sequence(prompt: list[int], *, generated: list[int] | None = None, computed: int = 0) -> Sequence:
    return Sequence(0, prompt, SamplingParams(), generated=list(generated or []), num_computed=computed)


def test_pending_is_the_prompt_first_and_then_the_latest_token() -> None:
    seq = sequence([5, 6, 7])
    assert (len(seq), seq.pending(), seq.num_pending, seq.in_prompt) == (3, [5, 6, 7], 3, True)
    seq.num_computed = 2
    assert (seq.pending(), seq.num_pending, seq.in_prompt) == ([7], 1, True)
    seq.num_computed = 3
    assert (seq.pending(), seq.num_pending, seq.in_prompt) == ([], 0, False)
    seq.generated.append(8)
    assert (len(seq), seq.pending(), seq.num_pending) == (4, [8], 1)


def test_pending_after_a_part_of_the_prompt_is_the_rest_and_what_follows() -> None:
    found = sequence([5, 6, 7], generated=[8], computed=2)
    assert found.pending() == [7, 8] and found.pending(1) == [7] and found.pending(0) == []


def test_sequences_with_equal_tokens_are_not_one() -> None:
    assert sequence([5]) != sequence([5])
