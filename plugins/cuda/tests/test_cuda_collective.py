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
from core_cuda import symmetric
from core_cuda.collective import why_not

WORKER = Path(__file__).with_name("collective_worker.py")


def asked(x: torch.Tensor) -> str | None:
    return why_not(OpCall(op=ALL_REDUCE.qualified_name, args={"x": x, "group": ""}))


def test_calls_that_the_kernel_does_not_take() -> None:
    assert "x is torch.float64" in str(asked(torch.ones(2, dtype=torch.float64)))
    assert asked(torch.ones(2)) == "nobody shares the group"


class Group:
    """A group as `_join` asks it."""

    group_name = "some"

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def test_groups_of_a_size_that_the_kernel_is_not_for() -> None:
    assert symmetric._join(Group(3)) == "the kernel is for 2, 4, 8 GPUs, and the group has 3"


def test_gpus_that_cannot_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    assert symmetric._why_apart() == "GPU 1 can't reach the memory of GPU 0"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert symmetric._why_apart() == ""


JOINING = """
import sys, time
from datetime import timedelta
import torch
from torch import distributed
from core_cuda import symmetric
rank, late, reason, timeout = int(sys.argv[1]), float(sys.argv[3]), sys.argv[4], float(sys.argv[5])
hosts = sys.argv[6].split(',')
wait = timedelta(seconds=timeout)
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2, timeout=wait)
symmetric._place = lambda: hosts[rank % len(hosts)]
symmetric._why_apart = lambda: reason if rank and reason != "at the rendezvous" else ""
def share(found):
    if rank and reason == "at the rendezvous":
        raise RuntimeError("not permitted")
    return object()
symmetric._share = share
ones = torch.ones(4)
if rank:
    distributed.all_reduce(ones)  # while the other waits for it to join
    time.sleep(late)
    print(symmetric.join(""))
else:
    work = distributed.all_reduce(ones, async_op=True)
    print(symmetric.join(""))
    work.wait()
print(symmetric.join(""), len(symmetric._shared))
"""


def joined(
    folder: Path, late: float = 0.0, reason: str = "", timeout: float = 60.0, hosts: str = "here"
) -> list[tuple[int, str]]:
    """Return the exit status and the output of two processes that join; the second comes late, with a reason."""
    command = [sys.executable, "-c", JOINING]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), str(late), reason, str(timeout), hosts],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [each.communicate(timeout=120)[0] for each in ranks]
    return [(each.returncode, text) for each, text in zip(ranks, said, strict=True)]


@pytest.mark.slow
def test_processes_join_whenever_they_come(tmp_path: Path) -> None:
    """One from a condition, another from its first run: no collective of the group may be needed for it."""
    for code, said in joined(tmp_path, late=1.0):
        assert code == 0 and said.split() == ["1"], said


@pytest.mark.slow
def test_one_process_that_cant_keeps_all_out(tmp_path: Path) -> None:
    for code, said in joined(tmp_path, reason="no way there"):
        assert code == 0 and said.splitlines() == ["rank 1: no way there", "rank 1: no way there 0"], said


@pytest.mark.slow
def test_processes_on_two_hosts_share_no_memory(tmp_path: Path) -> None:
    """Whatever the launcher says of the number of processes on each: a group may have some of each host."""
    for code, said in joined(tmp_path, hosts="here (boot 1),there (boot 2)"):
        reason = "rank 1 is on there (boot 2), rank 0 on here (boot 1)"
        assert code == 0 and said.splitlines() == [reason, f"{reason} 0"], said


def test_a_place_is_a_host_since_it_was_started_and_a_kind_of_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(symmetric, "_BOOT_ID", boot)
    monkeypatch.setattr(symmetric.socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(symmetric.launching, "num_multiprocessors", lambda: 132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    assert symmetric._place() == "node7 (boot unknown), H100 with 132 multiprocessors"
    boot.write_text("ab-cd\n")
    assert symmetric._place() == "node7 (ab-cd), H100 with 132 multiprocessors"


@pytest.mark.slow
def test_memory_that_one_process_cant_map_keeps_all_out(tmp_path: Path) -> None:
    for code, said in joined(tmp_path, reason="at the rendezvous"):
        reason = "rank 1: RuntimeError: not permitted"
        assert code == 0 and said.splitlines() == [reason, f"{reason} 0"], said


@pytest.mark.slow
def test_a_process_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    (code, said), _ = joined(tmp_path, late=12.0, timeout=4.0)
    assert code == 1 and "rank 1 did not come within 4 s" in said


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
