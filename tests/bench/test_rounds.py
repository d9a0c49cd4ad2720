"""Interleaving with subjects and a clock that only count: order, figures, failures, memory that is short."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.bench.cells import Cell, Record, spread
from core.bench.rounds import lacks_memory, measure
from core.errors import ModelError
from tests.support import cpu


class Clock:
    """Seconds that only subjects let pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """A subject whose steps take a second each, more with each round; notes what happens to it."""

    def __init__(self, name: str, log: list[str], clock: Clock, *, graph: bool = False) -> None:
        self.name, self.log, self.clock, self.graph = name, log, clock, graph
        self.fail_open: list[Exception] = []
        self.fail_run_at = -1
        self.num_runs = 0

    def open(self, cell: Cell, record: Record) -> None:
        self.log.append(f"open {self.name}")
        if self.fail_open:
            raise self.fail_open.pop()
        record.tokens = [[1]]

    def ready(self) -> None:
        self.clock.now += 100  # not measured

    def run(self, count: int) -> None:
        self.log.append(f"run {self.name}")
        self.num_runs += 1
        if self.num_runs == self.fail_run_at:
            raise RuntimeError("illegal   memory access")
        self.clock.now += count * self.num_runs

    def replay(self, count: int) -> bool:
        self.clock.now += count * 0.5
        return self.graph

    def finish(self, record: Record) -> None:
        record.details["finished"] = True

    def close(self) -> None:
        self.log.append(f"close {self.name}")

    def free(self) -> None:
        self.log.append(f"free {self.name}")


def _cell(rounds: int = 3, **changes: Any) -> Cell:
    return Cell(**{"phase": "decode", "batch": 1, "tokens": 8, "steps": 4, "rounds": rounds, **changes})


@pytest.fixture
def trio() -> tuple[list[Fake], list[str], Clock]:
    log, clock = list[str](), Clock()
    return [Fake("a", log, clock), Fake("b", log, clock, graph=True), Fake("c", log, clock)], log, clock


def test_each_begins_a_round_in_turn_and_only_runs_are_measured(trio: tuple[list[Fake], list[str], Clock]) -> None:
    fakes, log, clock = trio
    records, order = measure(fakes, _cell(), cpu(), clock=clock)
    assert order == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")]
    assert log[:3] == ["open a", "open b", "open c"]
    assert [line for line in log if line.startswith("run")] == [f"run {name}" for name in "abcbcacab"]
    assert log[-3:] == ["close a", "close b", "close c"]
    assert [record.rounds_ms for record in records] == [[1000.0, 2000.0, 3000.0]] * 3
    assert [record.replay_ms for record in records] == [[], [500.0] * 3, []]
    assert records[0].median_ms == 2000.0 and records[0].details == {"finished": True}


def test_one_that_fails_keeps_its_reason_and_the_others_go_on(trio: tuple[list[Fake], list[str], Clock]) -> None:
    fakes, log, clock = trio
    fakes[0].fail_run_at = 2
    fakes[2].fail_open = [ValueError("can't be\n  traced")]
    records, order = measure(fakes, _cell(), cpu(), clock=clock)
    assert records[0].failure == "RuntimeError: illegal memory access"
    assert records[2].failure == "ValueError: can't be traced" and not records[2].rounds_ms
    assert len(records[1].rounds_ms) == 3 and not records[1].failure
    assert order == [("a", "b"), ("b", "a"), ("b",)]
    assert "run c" not in log


def test_one_without_room_beside_the_others_runs_alone(trio: tuple[list[Fake], list[str], Clock]) -> None:
    fakes, log, clock = trio
    fakes[1].fail_open = [torch.OutOfMemoryError("no memory")]
    records, order = measure(fakes, _cell(rounds=2), cpu(), clock=clock)
    assert order == [("a", "c"), ("c", "a"), ("b",), ("b",)]
    # The others are gone before it begins again.
    again = len(log) - 1 - log[::-1].index("open b")
    assert log.index("close c") < again and max(log.index(f"free {name}") for name in "abc") < again
    assert [record.interleaved for record in records] == [True, False, True]
    assert "not interleaved" in records[1].notes[0] and len(records[1].rounds_ms) == 2


def test_one_without_room_at_all_says_so(trio: tuple[list[Fake], list[str], Clock]) -> None:
    fakes, _, clock = trio
    fakes[1].fail_open = [torch.OutOfMemoryError("still none"), torch.OutOfMemoryError("none")]
    records, _ = measure(fakes, _cell(rounds=2), cpu(), clock=clock)
    assert "still none" in records[1].failure and not records[0].failure


def test_what_counts_as_short_memory() -> None:
    wrapped = RuntimeError("backend failed")
    wrapped.__cause__ = torch.OutOfMemoryError("x")
    assert lacks_memory(wrapped)
    assert lacks_memory(RuntimeError("device out of memory while compiling"))
    assert lacks_memory(ModelError("a key/value cache of 3 GiB", found="1 GiB free", remedy="lower it"))
    assert not lacks_memory(ModelError("a batch of 8", found="one at a time", remedy="ask for 1"))
    assert not lacks_memory(ValueError("no"))


def test_a_cell_knows_its_room_and_its_mean_context() -> None:
    cell = _cell(rounds=2, tokens=100, batch=3)  # 8 steps: from 102 tokens seen to 109
    assert cell.name == "decode/3" and cell.limit == 110
    assert cell.mean_context == sum(range(102, 110)) / 8
    prompts = cell.prompts(50)
    assert [len(prompt) for prompt in prompts] == [100] * 3 and prompts == cell.prompts(50)
    assert prompts[0] != prompts[1] and all(0 <= token < 50 for prompt in prompts for token in prompt)
    assert _cell(phase="prefill", tokens=7).name == "prefill/7" and _cell(phase="prefill", tokens=7).mean_context == 7


def test_spread() -> None:
    assert spread([]) is None
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
