"""The scheduler without a model: order, budget, chunks, drafts, and that nothing is computed twice or never."""

from __future__ import annotations

from collections.abc import Sequence as List

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine.config import SamplingParams
from core.engine.serve.scheduler import Scheduler
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Step

VOCABULARY = 5


def new(index: int, length: int, max_new_tokens: int = 4, priority: int = 0) -> Sequence:
    prompt = [(index + i) % VOCABULARY for i in range(length)]
    return Sequence(index, prompt, SamplingParams(max_new_tokens=max_new_tokens, priority=priority))


class Places:
    """A `SequenceCache` of so many blocks of 4 tokens, or of so many sequences of any length."""

    keeps_states = False

    def __init__(self, *, places: int = 99, blocks: int = 10**6) -> None:
        self.places, self.blocks = places, blocks
        self.held: dict[int, int] = {}

    def join(self, sequence: Sequence) -> bool:
        self.held.setdefault(sequence.index, 0)
        if len(self.held) <= self.places and self.grow(sequence, len(sequence)):
            sequence.tables = [[1]]
            return True
        del self.held[sequence.index]
        return False

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        needed = -(-num_tokens // 4)
        others = sum(count for index, count in self.held.items() if index != sequence.index)
        if needed + others > self.blocks:
            return False
        self.held[sequence.index] = max(needed, self.held[sequence.index])
        return True

    def fits(self, wanted: List[tuple[Sequence, int]], *, without: List[Sequence] = ()) -> bool:
        needed = {each.index: -(-count // 4) for each, count in wanted}
        gone = {each.index for each in without}
        held = {index: count for index, count in self.held.items() if index not in gone}
        return sum({**held, **{i: max(n, held.get(i, 0)) for i, n in needed.items()}}.values()) <= self.blocks

    def trim(self, sequence: Sequence) -> None:
        self.held[sequence.index] = min(self.held.get(sequence.index, 0), -(-len(sequence) // 4))

    def settle(self, sequence: Sequence) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        sequence.tables = []
        self.held.pop(sequence.index, None)


def scheduler(
    *lengths: int, budget: int = 8, seqs: int = 3, drafts: int = 0, places: int = 99, blocks: int = 10**6
) -> Scheduler:
    cache = Places(places=places, blocks=blocks)
    found = Scheduler(cache, max_num_seqs=seqs, max_step_tokens=budget, num_drafts=drafts)
    for index, length in enumerate(lengths):
        found.add(new(index, length))
    return found


def compute(step: Step | None) -> list[tuple[int, int]]:
    """Stand in for the engine: one token of each that emits. Returns (sequence, tokens) of the parts."""
    assert step is not None
    parts = [(part.sequence.index, part.num_tokens) for part in step.parts]
    for part in step.parts:
        emits = part.emits
        part.sequence.num_computed += part.num_tokens
        if emits:
            part.sequence.generated.append(len(part.sequence) % VOCABULARY)
    return parts


def test_prompts_share_a_step_up_to_its_budget_and_the_last_is_cut() -> None:
    queue = scheduler(3, 2, 9)
    step = queue.schedule()
    assert step is not None and step.phase == "prefill"
    assert compute(step) == [(0, 3), (1, 2), (2, 3)]
    # The two that generate come first, the rest of the prompt fills the step.
    step = queue.schedule()
    assert step is not None and step.phase == "prefill"
    assert compute(step) == [(0, 1), (1, 1), (2, 6)]
    step = queue.schedule()
    assert step is not None and step.phase == "decode"
    assert compute(step) == [(0, 1), (1, 1), (2, 1)]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    queue = scheduler(20)
    assert [compute(queue.schedule()) for _ in range(4)] == [[(0, 8)], [(0, 8)], [(0, 4)], [(0, 1)]]


def test_those_that_generate_do_not_wait_for_a_long_prompt() -> None:
    queue = scheduler()
    queue.add(new(0, 2, max_new_tokens=20))
    compute(queue.schedule())
    queue.add(new(1, 100))
    for _ in range(10):
        assert compute(queue.schedule()) == [(0, 1), (1, 7)]


def test_nobody_joins_beyond_the_number_of_sequences_or_the_room_of_the_cache() -> None:
    queue = scheduler(1, 1, 1, 1, seqs=2)
    assert compute(queue.schedule()) == [(0, 1), (1, 1)]
    assert (queue.num_running, queue.num_waiting) == (2, 2)
    queue = scheduler(1, 1, 1, places=1)
    assert compute(queue.schedule()) == [(0, 1)]
    assert (queue.num_running, queue.num_waiting) == (1, 2)


def test_a_place_that_is_left_is_taken_by_the_first_that_waits() -> None:
    queue = scheduler(1, 1, 5, 1, seqs=2)
    step = queue.schedule()
    compute(step)
    assert step is not None
    queue.remove(step.parts[0].sequence)
    assert compute(queue.schedule()) == [(1, 1), (2, 5)]


def test_a_removed_sequence_is_gone_wherever_it_was() -> None:
    queue = scheduler(1, seqs=1)
    waiting = new(7, 3)
    queue.add(waiting)
    step = queue.schedule()
    assert step is not None
    queue.remove(waiting)
    queue.remove(step.parts[0].sequence)
    queue.remove(waiting)
    assert queue.schedule() is None
    assert (queue.num_running, queue.num_waiting) == (0, 0)


def test_a_step_that_failed_is_scheduled_again() -> None:
    queue = scheduler(3, 9)
    first = queue.schedule()
    assert queue.schedule() == first
    compute(first)
    assert queue.schedule() != first


def test_drafts_go_with_generating_sequences_only() -> None:
    queue = scheduler(8, 2, budget=9, drafts=2)
    step = queue.schedule()
    assert step is not None and not any(part.drafts for part in step.parts)
    compute(step)
    step = queue.schedule()  # holds the rest of the second prompt, so there are no drafts yet
    assert step is not None and (step.phase, [part.drafts for part in step.parts]) == ("prefill", [(), ()])
    compute(step)
    step = queue.schedule()
    assert step is not None and step.phase == "verify"
    (first, second) = step.parts
    assert first.sequence.prompt[-3:] + first.sequence.generated == [0, 1, 2, 3, 4]
    assert (first.num_tokens, first.drafts) == (1, (0,))  # two may follow, one of them is the step's own
    assert second.sequence.prompt + second.sequence.generated == [1, 2, 2]
    assert second.drafts == (2, 2)


@pytest.mark.parametrize(("max_new_tokens", "count"), [(9, 3), (4, 2), (3, 1), (2, 0)])
def test_no_draft_lies_beyond_what_may_be_generated(max_new_tokens: int, count: int) -> None:
    queue = scheduler(drafts=3)
    sequence = Sequence(0, [1, 1, 1], SamplingParams(max_new_tokens=max_new_tokens))
    sequence.generated, sequence.num_computed = [1], 3
    assert queue._cache.join(sequence)
    queue._running.append(sequence)
    step = queue.schedule()
    assert step is not None
    assert (step.phase, len(step.parts[0].drafts)) == ("verify" if count else "decode", count)


def test_the_one_that_joined_last_makes_room_and_goes_on_before_all_others() -> None:
    queue = scheduler(7, 6, 3, seqs=2, budget=16, blocks=4)
    assert compute(queue.schedule()) == [(0, 7), (1, 6)]
    assert compute(queue.schedule()) == [(0, 1), (1, 1)]  # eight tokens of each are four blocks
    assert compute(queue.schedule()) == [(0, 1)]
    assert (queue.num_preempted, queue.num_running, queue.num_waiting) == (1, 1, 2)
    assert compute(queue.schedule()) == [(0, 1)]
    queue.remove(queue._running[0])
    assert compute(queue.schedule()) == [(1, 8), (2, 3)]  # the prompt and what was generated of it
    assert compute(queue.schedule()) == [(1, 1), (2, 1)]


def test_one_whose_last_token_is_under_way_makes_room_first() -> None:
    queue = scheduler(7, 6, seqs=2, budget=16, blocks=4)
    compute(queue.schedule())
    compute(queue.schedule())
    second = queue._running[1]
    second.generated.pop()
    second.num_computed, second.num_awaited = 7, 2
    second.generated.append(0)
    assert second.has_all
    assert compute(queue.schedule()) == [(0, 1)]
    assert queue.num_preempted == 0


def test_one_that_made_room_for_its_last_token_waits_again_where_that_step_fails() -> None:
    plan = scheduler(3, 3, blocks=2, budget=8)
    first, last = plan._waiting._queues[0]
    first.params = SamplingParams(max_new_tokens=1)
    step = plan.schedule()
    assert step is not None and len(step.parts) == 2
    for part in step.parts:
        part.launched()
    behind = plan.schedule()  # `last` grows by what `first` has
    assert behind is not None
    last.num_computed = 4
    more = plan._cache.grow(last, 5) or plan._make_room([(last, 5)]) == []
    assert more and not first.tables and first.has_all

    plan.take_back([step])
    assert (plan.num_running, plan.num_waiting) == (1, 1)
    assert first.num_computed == 0 and first.num_preemptions == 1
    plan.remove(last)
    again = plan.schedule()
    assert again is not None and [part.sequence for part in again.parts] == [first]
    assert again.parts[0].first_position == 0 and again.parts[0].emits


def test_prompts_that_hold_each_other_up_end_by_one_giving_way() -> None:
    queue = scheduler(blocks=4, seqs=2, budget=4)
    for index in range(2):
        sequence = new(index, 12)
        queue._cache.held[index] = 2  # type: ignore[attr-defined]  # as joined where windows let them
        sequence.num_computed = 8
        queue._running.append(sequence)
    assert compute(queue.schedule()) == [(0, 4)]
    assert (queue.num_preempted, queue.num_waiting) == (1, 1)


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12)


def test_a_prompt_that_is_not_to_be_cut_waits_for_a_step_of_its_own() -> None:
    queue = Scheduler(Places(), max_num_seqs=3, max_step_tokens=8, whole_prompts=True)
    for index, length in enumerate((5, 6, 20)):
        queue.add(new(index, length, 9))
    assert compute(queue.schedule()) == [(0, 5)]
    # The budget has room for 7 more beside the generating one: for the second prompt, but not for a part of the third.
    assert compute(queue.schedule()) == [(0, 1), (1, 6)]
    # What no step has room for is cut all the same, and may exceed the budget by those who generate.
    assert compute(queue.schedule()) == [(0, 1), (1, 1), (2, 8)]
    assert compute(queue.schedule()) == [(0, 1), (1, 1), (2, 8)]
    assert compute(queue.schedule()) == [(0, 1), (1, 1), (2, 4)]
    assert compute(queue.schedule()) == [(0, 1), (1, 1), (2, 1)]


def test_sequences_of_a_failed_step_begin_anew_where_the_cache_keeps_states() -> None:
    queue = scheduler(3, 9, 2)
    queue._cache.keeps_states = True
    compute(queue.schedule())
    compute(queue.schedule())
    step = queue.schedule()
    assert step is not None
    lost = {part.sequence.index for part in step.parts}
    queue.take_back([step])
    assert (queue.num_running, queue.num_waiting) == (3 - len(lost), len(lost))
    assert all(part.sequence.num_computed == 0 for part in step.parts)
    again = queue.schedule()
    assert again is not None and again.phase == "prefill"


@settings(deadline=None, max_examples=150)
@given(
    requests, st.integers(1, 4), st.integers(0, 12), st.integers(0, 3), st.integers(1, 4), st.sampled_from([10**6, 10])
)
def test_every_token_is_computed_once_in_order_within_the_budget(
    arrivals: list[tuple[int, int, int]], seqs: int, more: int, drafts: int, places: int, blocks: int
) -> None:
    """arrivals: prompt length, tokens to generate, steps to wait before it is added."""
    budget, cache = seqs + more, Places(places=places, blocks=blocks)
    queue = Scheduler(cache, max_num_seqs=seqs, max_step_tokens=budget, num_drafts=drafts)
    coming = [(wait, new(index, length, count)) for index, (length, count, wait) in enumerate(arrivals)]
    unfinished, joined = len(coming), list[int]()
    for _ in range(2000):
        while coming and coming[0][0] <= 0:
            queue.add(coming.pop(0)[1])
        coming[:1] = [(wait - 1, sequence) for wait, sequence in coming[:1]]
        step = queue.schedule()
        if step is None:
            assert not queue.num_running and not queue.num_waiting
            if not coming:
                break
            continue
        generating = [p.sequence.index for p in step.parts if not p.sequence.in_prompt]
        running = [s.index for s in queue._running if not s.in_prompt]
        assert generating == running  # nobody who generates is left out
        assert len(step.parts) <= seqs
        if step.phase == "prefill":
            assert sum(part.num_tokens for part in step.parts) <= budget
            assert not any(part.drafts for part in step.parts)
            waiting_for = [part for part in step.parts if part.sequence.in_prompt]
            assert all(part.emits for part in waiting_for[:-1])  # the first prompt is finished first
        for part in step.parts:
            sequence, emits = part.sequence, part.emits
            assert 1 <= part.num_tokens <= sequence.num_pending and len(part.drafts) <= drafts
            if sequence.num_computed == 0 and not sequence.num_preemptions:
                joined.append(sequence.index)
            sequence.num_computed += part.num_tokens
            if emits:
                sequence.generated.append(len(sequence) % VOCABULARY)
                assert len(sequence.generated) + len(part.drafts) <= sequence.params.max_new_tokens
            if len(sequence.generated) == sequence.params.max_new_tokens:
                assert sequence.num_computed == len(sequence) - 1
                queue.remove(sequence)
                unfinished -= 1
    assert unfinished == 0  # nobody starved
    assert joined == sorted(joined)  # first come, first served
