"""core_cpu/shared_groups.py: processes of one machine join, others keep gloo, and whoever ends is missed at once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from core.common.telling import _num_told
from core.errors import LoweringError
from core_cpu import extension, shared_groups
from tests.common.processes import launch
from tests.support import refused

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels")]

WORKER = "plugins.cpu.tests.shared_memory_worker"
OPS = ["core::all_gather", "core::all_reduce", "core::reduce_scatter"]


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def processes(request: pytest.FixtureRequest) -> list[Any]:
    return launch(WORKER, "numbers", size=request.param)


def test_all_get_the_same_bits_which_are_as_good_as_those_of_gloo(processes: list[Any]) -> None:
    assert [each["joined"] for each in processes] == [""] * len(processes)
    assert [each["wrong"] for each in processes] == [[]] * len(processes)
    first = processes[0]["sums"]
    assert len(first) == 8 and all(each["sums"] == first for each in processes)


def test_each_of_many_sums_is_right(processes: list[Any]) -> None:
    assert [each["num_wrong"] for each in processes] == [0] * len(processes)


def test_groups_of_some_processes_join_and_leave_nothing_behind(processes: list[Any]) -> None:
    for rank, each in enumerate(processes):
        found = each["groups"]
        assert found["moved"] == ([[0, 1]] * 3 if rank < 2 else [])
        assert found["open"] == ([1, *[2, 1] * 3] if rank < 2 else [1] * 4)


def test_a_forked_process_is_told_to_join_a_group_of_its_own(processes: list[Any]) -> None:
    for each in processes:
        assert "was joined before this process was forked" in each["forked"]
        assert each["after"] == len(processes)


def test_compiled_graphs_are_shared_objects_that_call_the_kernels_also_of_a_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORE_CACHE", "1")
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path))
    cold, warm = ([(each.pop("kernels"), each) for each in launch(WORKER, "compiled")] for _ in range(2))
    assert any(kernels for kernels, _ in cold) and [kernels for kernels, _ in warm] == [0, 0]
    for _, each in (*cold, *warm):
        assert (each["num_wrong"], each["notes"], each["joined"], each["open"]) == (0, [], "", 1)
        assert each["chosen"] == [[op, "cpu_shared_memory"] for op in OPS]


def test_processes_of_several_machines_keep_gloo_and_say_so_once() -> None:
    reason = "rank 1: OSError: the memory of rank 0 is not on this machine, or in another container"
    for each in launch(WORKER, "elsewhere"):
        assert (each["num_wrong"], each["notes"], each["open"]) == (0, [], 0)
        assert each["chosen"] == [[op, "reference"] for op in OPS]
        assert each["joined"] == f"the group's processes do not share memory: {reason}"
        assert each["said"] == [f"collectives of group '0' go by gloo: {reason}"]
        assert each["own"] == [2.0, 2.0]


def test_a_process_that_ends_is_missed_though_one_that_it_forked_lives_on() -> None:
    told, _ = launch(WORKER, "dead")
    assert told["forked"] in ("S", "R")  # it lived on
    assert "rank 0 of 2 in group '0' waits in all_reduce of 4 bytes of Float for rank 1" in told["error"]
    assert "its process has ended, or left the group" in told["error"] and "start all" in told["error"]


class Silent:
    """A group of two whose other process has said where its memory would be, if that was asked, and then nothing."""

    group_name = "silent"

    def __init__(self, rank: int) -> None:
        self._store: Any = distributed.HashStore()  # type: ignore[attr-defined]
        self.rank, self.size = lambda: rank, lambda: 2

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=0.2)))

    def get_group_store(self) -> Any:
        return self._store


def test_a_process_that_does_not_come_leaves_no_memory_behind() -> None:
    assert extension.load("collectives") == ""
    files = set(Path("/proc/self/fd").iterdir())
    with refused(LoweringError, "rank 1 did not come within 0.2 s"):
        shared_groups._join(Silent(0))
    later = Silent(0)  # it came, and was gone before it said that it had joined
    count = _num_told["core_cpu", "silent"] + 1
    later._store.set(f"core_cpu/{count}/1", "!")
    with refused(LoweringError, "rank 1 did not come within 0.2 s"):
        shared_groups._join(later)
    assert set(Path("/proc/self/fd").iterdir()) == files
