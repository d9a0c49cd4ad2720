"""Priorities and budgets of steps: who joins first, who gives way, that nobody starves, and what a step holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.models.assets import embedded_model
from core.engine.serve.engine import Engine
from core.engine.serve.scheduler import MAX_GIVEN_WAY, Scheduler
from core.engine.serve.waiting import MAX_PASSED, WaitingSequences
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sequence import Sequence
from tests.engine.serve.test_scheduler import Places, compute, new


def queue_of(
    *sequences: Sequence, seqs: int = 3, budget: int = 8, mixed: int | None = None, blocks: int = 10**6
) -> Scheduler:
    found = Scheduler(Places(blocks=blocks), max_num_seqs=seqs, max_step_tokens=budget, mixed_step_tokens=mixed)
    for sequence in sequences:
        found.add(sequence)
    return found


def taken(waiting: WaitingSequences) -> int:
    """Let the next one join and return its index."""
    first = waiting.first()
    assert first is not None
    waiting.joined(first)
    return first.index


def test_the_smaller_priority_joins_first_and_equals_by_arrival() -> None:
    queue = queue_of(new(0, 2), new(1, 2, priority=5), new(2, 2, priority=-1), new(3, 2), seqs=4, budget=16)
    assert compute(queue.schedule()) == [(2, 2), (0, 2), (3, 2), (1, 2)]


def test_one_that_runs_is_not_sent_away_for_one_that_waits() -> None:
    queue = queue_of(new(0, 2, priority=3), seqs=1)
    compute(queue.schedule())
    queue.add(new(1, 2))
    assert compute(queue.schedule()) == [(0, 1)]
    assert (queue.num_running, queue.num_waiting) == (1, 1)


def test_the_one_that_has_waited_longest_joins_after_so_many_others() -> None:
    waiting = WaitingSequences()
    waiting.add(new(0, 1, priority=9))
    for index in range(1, 30):
        waiting.add(new(index, 1, priority=-index))
    found = [taken(waiting) for _ in range(2 * MAX_PASSED + 2)]
    assert found.index(0) == MAX_PASSED and found[:2] == [29, 28]
    assert found[2 * MAX_PASSED + 1] == 1  # and so on: the one that has waited longest then


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40))
def test_nobody_is_passed_for_ever_however_many_urgent_ones_come(priorities: list[int]) -> None:
    """Urgent ones keep coming, one for each that joins; all others join within their bound."""
    waiting, joined = WaitingSequences(), list[int]()
    for index, priority in enumerate(priorities):
        waiting.add(new(index, 1, priority=priority))
    first = len(priorities)
    for index in range(first, first + first * (MAX_PASSED + 1)):
        waiting.add(new(index, 1, priority=-99))
        joined.append(taken(waiting))
    assert all(joined.index(index) < (index + 1) * (MAX_PASSED + 1) for index in range(len(priorities)))


def test_a_removed_sequence_waits_no_more() -> None:
    waiting, one, other = WaitingSequences(), new(0, 1, priority=2), new(1, 1)
    waiting.add(one)
    waiting.remove(other)
    waiting.remove(one)
    assert len(waiting) == 0 and waiting.first() is None


def test_the_least_urgent_gives_its_cache_back_though_it_joined_first() -> None:
    queue = queue_of(new(0, 7, priority=1), new(1, 7), new(2, 7), budget=32, blocks=6)
    assert compute(queue.schedule()) == [(1, 7), (2, 7), (0, 7)]
    late = queue_of(new(0, 7, 9, priority=1), budget=32, blocks=4)
    assert compute(late.schedule()) == [(0, 7)]
    late.add(new(1, 6, 9))
    assert compute(late.schedule()) == [(0, 1), (1, 6)]
    assert compute(late.schedule()) == [(1, 1)]  # the ninth token of the first is a third block
    assert (late.num_preempted, late.num_running, late.num_waiting) == (1, 1, 1)


def test_one_that_was_planned_already_is_left_out_when_it_gives_way() -> None:
    queue = queue_of(new(0, 7, 9, priority=1), budget=32, blocks=4)
    compute(queue.schedule())
    queue.add(new(1, 7, 9))
    compute(queue.schedule())  # eight of the first, seven of the second
    first, second = queue._running
    queue._cache.grow(second, 8)
    first.generated.pop()
    first.num_computed -= 1  # its next token has room, and the second's ninth has none
    second.num_computed, second.generated = 8, [0, 0]
    assert compute(queue.schedule()) == [(1, 1)]
    assert queue.num_preempted == 1 and first.num_computed == 0


def test_who_has_given_way_often_counts_as_urgent() -> None:
    often, urgent = new(0, 7, 9, priority=7), new(1, 7, 9)
    often.num_preemptions = MAX_GIVEN_WAY
    queue = queue_of(often, urgent, budget=32, blocks=4)
    queue._waiting._num_passed = MAX_PASSED  # so that it joins first
    assert compute(queue.schedule()) == [(0, 7), (1, 7)]
    assert compute(queue.schedule()) == [(0, 1), (1, 1)]
    assert compute(queue.schedule()) == [(0, 1)]
    assert urgent.num_preemptions == 1


def test_prompts_beside_those_that_generate_are_bounded_and_alone_they_are_not() -> None:
    queue = queue_of(new(0, 8, 30), mixed=2)
    assert compute(queue.schedule()) == [(0, 8)]
    queue.add(new(1, 5))
    queue.add(new(2, 5))
    steps = [compute(queue.schedule()) for _ in range(6)]
    assert steps[:4] == [[(0, 1), (1, 2)], [(0, 1), (1, 2)], [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 1), (2, 2)]]
    assert steps[5] == [(0, 1), (1, 1), (2, 1)]


TEXTS = ["If the argument is", "Return a list of the names that the module defines", "This", "The Python interpreter"]
CONFIG = EngineConfig(
    max_num_seqs=3, max_model_len=48, block_size=4, cache_tokens=80, options=CompileOptions(mode="off")
)
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def alone() -> Iterator[list[tuple[int, ...]]]:
    """The tokens of each text without the others."""
    with Engine.load(embedded_model(), "cpu", CONFIG) as engine:
        yield [engine.generate([text], GREEDY)[0].token_ids for text in TEXTS]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, mixed_step_tokens=3),
        replace(CONFIG, max_step_tokens=7),
        replace(CONFIG, prefill_buckets=(32,), max_step_tokens=9, mixed_step_tokens=2),
    ],
)
def test_tokens_are_those_of_each_prompt_alone(alone: list[tuple[int, ...]], config: EngineConfig) -> None:
    params = [replace(GREEDY, priority=priority) for priority in (2, 0, 1, -1)]
    with Engine.load(embedded_model(), "cpu", config) as engine, engine.timeline() as noted:
        assert [each.token_ids for each in engine.generate(TEXTS, params)] == alone
    prompts = [about for _, _, _, about in noted if about["phase"] == "prefill"]
    assert prompts and max(about["tokens"] for about in prompts) <= (config.max_step_tokens or 48)
