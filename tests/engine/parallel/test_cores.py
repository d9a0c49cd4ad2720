"""core/engine/parallel/cores.py: ranks of one machine get cores of their own, whole and alike in number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine.parallel import cores


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_are_disjoint_whole_and_alike_in_number(count: int) -> None:
    there = [(0, 8), (1, 9), (2, 10), (3, 11), (4, 12)]
    parts = cores.divide(there, count)
    assert sorted(number for part in parts for number in part) == sorted(n for core in there for n in core)
    assert all(set(core) <= set(part) or not set(core) & set(part) for core in there for part in parts)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 2 and len(parts) == count


def test_fewer_cores_than_ranks_are_nobodys() -> None:
    assert cores.divide([(0, 1)], 2) == [(), ()]


def test_processors_of_one_core_stay_together_and_sockets_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Linux numbers the second processors of all cores last.
    for number, (package, core) in {0: (0, 0), 1: (1, 0), 2: (0, 1), 4: (0, 0), 5: (1, 0)}.items():
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5})
    assert cores.own_cores(f"{tmp_path}/{{}}") == [(0, 4), (2,), (1, 5)]


def test_a_machine_that_hides_its_cores_has_one_for_each_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 1})
    assert sorted(cores.own_cores("/nowhere/{}")) == [(1,), (3,)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine of four cores with two processors each, whose settings are only noted."""
    done: dict[str, Any] = {}
    monkeypatch.setattr(cores, "own_cores", lambda: [(0, 4), (1, 5), (2, 6), (3, 7)])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, numbers: done.update(numbers=numbers))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: done.update(threads=number))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return done


def test_a_rank_is_pinned_to_its_part_with_a_thread_for_each_core(machine: dict[str, Any]) -> None:
    assert cores.pin(1, 2) == "pinned, this one to processors 2-3,6-7 with 2 threads"
    assert machine == {"numbers": (2, 6, 3, 7), "threads": 2}


def test_threads_that_the_user_limits_stay_limited(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cores.pin(0, 2).endswith("1 thread")


def test_too_many_ranks_are_told_and_not_pinned(machine: dict[str, Any]) -> None:
    assert cores.pin(4, 5) == "not pinned: 4 cores for 5 ranks, one thread each"
    assert machine == {"threads": 1}
