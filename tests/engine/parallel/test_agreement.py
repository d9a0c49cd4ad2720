"""core/engine/parallel/agreement.py: what differs between ranks is refused by name, with the ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed

from core.engine.parallel.agreement import RanksMissing, agree, compare, described, difference
from core.errors import UsageError

FACTS = {"buckets": {"decode": [1, 8], "prefill": [32]}, "order of passes": ["a", "b"]}


def test_equal_facts_are_no_difference() -> None:
    assert difference([described(FACTS), described(dict(reversed(FACTS.items())))]) == ""


def test_an_entry_of_a_mapping_is_named_by_itself() -> None:
    other = {**FACTS, "buckets": {"decode": [1, 8], "prefill": [64]}}
    assert difference([described(FACTS), described(other), described(FACTS)]) == (
        "buckets: prefill: [32] on ranks 0, 2, [64] on rank 1"
    )


def test_the_order_of_passes_is_a_fact() -> None:
    other = {**FACTS, "order of passes": ["b", "a"]}
    assert 'order of passes: ["a", "b"] on rank 0, ["b", "a"] on rank 1' in difference(
        [described(FACTS), described(other)]
    )


def test_what_one_rank_lacks_differs() -> None:
    assert difference([described({"pass": {"x": "1"}}), described({"pass": {}})]) == (
        'pass: x: "1" on rank 0, nothing on rank 1'
    )


def test_long_facts_are_told_apart_by_digest() -> None:
    found = difference([described({"config": "x" * 500}), described({"config": "x" * 499 + "y"})])
    assert found.count("(") == 2 and len(found) < 250


def test_many_differences_are_counted() -> None:
    one, two = (described({str(number): value for number in range(5)}) for value in (1, 2))
    assert difference([one, two]).endswith("; and 2 more")


def agreed(facts: dict[int, tuple[str, dict[str, Any]]], size: int) -> dict[int, Exception]:
    """Let ranks, each a thread, compare facts through one store; return the errors. Ranks that are not named stay
    away."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=1))
    errors: dict[int, Exception] = {}

    def work(rank: int) -> None:
        try:
            compare(store, rank, size, *facts[rank])
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in facts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return errors


def test_ranks_with_equal_facts_agree() -> None:
    assert agreed(dict.fromkeys(range(3), ("the options", FACTS)), 3) == {}


def test_each_rank_refuses_and_names_the_one_that_differs() -> None:
    errors = agreed({0: ("the cache", {"blocks": 7}), 1: ("the cache", {"blocks": 6})}, 2)
    assert [type(error) for error in errors.values()] == [UsageError] * 2
    assert "blocks: 7 on rank 0, 6 on rank 1" in str(errors[0])


def test_ranks_that_came_to_different_points_are_told() -> None:
    errors = agreed({0: ("the cache", {}), 1: ("the options", {})}, 2)
    assert 'come to: "the cache" on rank 0, "the options" on rank 1' in str(errors[1])


def test_a_rank_that_does_not_come_is_named() -> None:
    errors = agreed({0: ("the cache", {}), 2: ("the cache", {})}, 3)
    assert [type(error) for error in errors.values()] == [RanksMissing] * 2
    assert "rank 1 did not come within 1 s" in str(errors[0])


def test_alone_there_is_nothing_to_agree_on() -> None:
    agree("the options", lambda: pytest.fail("asked for facts"))
