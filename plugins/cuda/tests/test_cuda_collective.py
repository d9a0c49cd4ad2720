"""`core::all_reduce` by memory that GPUs share: what it takes, and with two GPUs what it gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.common.ops.collective import ALL_REDUCE
from core.common.ops.implementation import OpCall
from core_cuda import collective
from core_cuda.collective import why_not

WORKER = Path(__file__).with_name("collective_worker.py")


def asked(x: torch.Tensor) -> str | None:
    return why_not(OpCall(op=ALL_REDUCE.qualified_name, args={"x": x, "group": ""}))


def test_calls_that_the_kernel_does_not_take() -> None:
    assert "x is torch.float16" in str(asked(torch.ones(2, dtype=torch.float16)))
    assert asked(torch.ones(2)) == "nobody shares the group"


class Group:
    """A group as `_why_apart` asks it."""

    group_name = "some"

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize(
    ("size", "local", "reason"),
    [(3, "3", "measured for 2, 4, 8 GPUs"), (4, "2", "2 ranks are on this host"), (2, "", "an unknown number of")],
)
def test_groups_that_share_no_memory(monkeypatch: pytest.MonkeyPatch, size: int, local: str, reason: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local or "0")
    assert reason in collective._why_apart(Group(size))


def test_gpus_that_cannot_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    assert collective._why_apart(Group(2)) == "GPU 1 can't reach the memory of GPU 0"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert collective._why_apart(Group(2)) == ""


def test_one_process_gets_a_copy() -> None:
    x = torch.arange(6.0).view(2, 3)
    found = ALL_REDUCE.reference(x, "")
    assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()


@pytest.mark.gpu
def test_two_gpus_sum_what_nccl_sums_in_graphs_too() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["joined"] == "" and found["by_kernel"] and all(found["equal"].values()), found
    assert found["ranks_agree"] and found["replayed"], found
