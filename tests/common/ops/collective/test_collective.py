"""core/common/ops/collective/collectives.py alone, in a group of one, and between two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.common.ops.collective.collectives import ALL_REDUCE
from tests.common.ops.canonical_oracle import assert_raises, run

RANK = """
import sys
import torch
from torch import distributed
from core.common.ops.collective.collectives import ALL_REDUCE

store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
own = distributed.new_group([0], use_local_synchronization=True) if rank == 0 else None
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    x = (torch.arange(24).view(4, 6).t() * 10 ** rank).to(dtype)
    before = x.clone()
    for group in ("", distributed.group.WORLD.group_name):
        out = ALL_REDUCE.overload(x, group)
        assert out.dtype == dtype and out.is_contiguous() and torch.equal(x, before)
        assert torch.equal(out, sum((torch.arange(24).view(4, 6).t() * 10**r).to(dtype) for r in range(size)))
    assert ALL_REDUCE.overload(torch.ones(0, 6, dtype=dtype), "").shape == (0, 6)
if own is not None:
    assert torch.equal(ALL_REDUCE.overload(x, own.group_name), x)
print("reduced")
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_processes_of_a_group_get_the_sum(size: int, tmp_path: Path) -> None:
    arguments = [[sys.executable, "-c", RANK, str(tmp_path / "store"), str(rank), str(size)] for rank in range(size)]
    ranks = [subprocess.Popen(a, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for a in arguments]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=120)
            assert (rank.returncode, out) == (0, "reduced\n"), err
    finally:
        # A rank whose peer failed would wait for it.
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("group", ["", "any"])
def test_without_a_process_group_it_is_a_copy(group: str) -> None:
    x = torch.linspace(0, 1, 12).view(3, 4).t()
    (out,) = run(ALL_REDUCE, {"x": x, "group": group})
    assert torch.equal(out, x) and out.is_contiguous() and out.data_ptr() != x.data_ptr()


def test_complex_numbers_are_refused() -> None:
    assert_raises(ALL_REDUCE, {"x": torch.ones(3, dtype=torch.complex64), "group": ""}, "x must be real, not")
