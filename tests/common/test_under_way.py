"""core/common/under_way.py: work that goes on by itself between a beginning and an end."""

from __future__ import annotations

import pytest

from core.common.under_way import Steps, UnderWay, finish


def steps(seen: list[str], pauses: int = 1, fails: str = "") -> Steps[int]:
    seen.append("begun")
    try:
        for number in range(pauses):
            yield bool
            if fails == f"after pause {number}":
                raise RuntimeError(fails)
            seen.append(f"waited {number}")
        return pauses
    finally:
        seen.append("cleaned up")


def test_it_pauses_once_begun_and_goes_on_when_it_is_finished() -> None:
    seen: list[str] = []
    work = UnderWay(steps(seen, pauses=2))
    assert seen == ["begun"]
    assert work.finish() == 2 and seen == ["begun", "waited 0", "waited 1", "cleaned up"]
    assert work.finish() == 2 and len(seen) == 4
    work.abandon()
    assert len(seen) == 4


def test_work_without_a_pause_is_done_at_once() -> None:
    seen: list[str] = []
    assert UnderWay(steps(seen, pauses=0)).finish() == 0 and seen == ["begun", "cleaned up"]
    assert finish(steps([], pauses=3)) == 3


def test_abandoned_work_cleans_up() -> None:
    seen: list[str] = []
    UnderWay(steps(seen)).abandon()
    assert seen == ["begun", "cleaned up"]


def test_what_goes_wrong_meanwhile_is_raised_at_the_end() -> None:
    seen: list[str] = []
    work = UnderWay(steps(seen, fails="after pause 0"))
    with pytest.raises(RuntimeError, match="after pause 0"):
        work.finish()
    assert seen == ["begun", "cleaned up"]


def test_it_goes_on_without_waiting_as_far_as_it_is_ready() -> None:
    ready = {"first": True, "second": False}

    def pauses() -> Steps[str]:
        for name in ready:
            yield lambda name=name: ready[name]  # type: ignore[misc]
        return "done"

    work = UnderWay(pauses())
    assert work.advance() and not work.advance() and not work.is_done
    ready["second"] = True
    assert work.advance() and work.is_done and work.finish() == "done" and not work.advance()
