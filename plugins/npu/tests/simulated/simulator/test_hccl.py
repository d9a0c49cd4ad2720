"""HCCL between processes, as the real torch_npu calls it: collectives of one and of two ranks, captured, and errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from npu_hccl_worker import DTYPES, OPS, drawn

from tests.common.processes import launch


@cache
def _ran(size: int, schedule: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_SIM_DEVICES", str(size))
        patch.setenv("ASCEND_SIM_SCHEDULE", schedule)
        return launch("npu_hccl_worker", "right", size=size, timeout_s=100)


RUNS = [(1, "eager"), (2, "eager"), (2, "lazy")]
runs = pytest.mark.parametrize(("size", "schedule"), RUNS)


@runs
def test_reductions_are_in_the_order_of_ranks_and_rounded_once(size: int, schedule: str) -> None:
    combine = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
    for each in _ran(size, schedule):
        for dtype in DTYPES:
            for op in OPS:
                wide = torch.float32 if dtype.is_floating_point else torch.int64
                total = drawn(dtype, 0).to(wide)
                for rank in range(1, size):
                    total = combine[op](total, drawn(dtype, rank).to(wide))
                got = torch.tensor(each["reductions"][f"{dtype} {op}"], dtype=torch.float64)
                assert torch.equal(got, total.to(dtype).double()), (dtype, op)


@runs
def test_tensors_move_where_they_belong(size: int, schedule: str) -> None:
    parts = [[10.0 * rank + i for i in range(6)] for rank in range(size)]
    total = [sum(column) for column in zip(*parts, strict=True)]
    for rank, each in enumerate(_ran(size, schedule)):
        found, share = each["moves"], 6 // size
        assert found["all_gather"] == [value for part in parts for value in part]
        assert found["bytes"] == [int(part[0]) for part in parts]
        assert found["reduce_scatter"] == total[rank * share : (rank + 1) * share]
        assert found["broadcast"] == parts[-1] and found["another group"] == total
        assert found["reduce"] == (total if rank == 0 else parts[rank]) and found["no elements"] == parts[rank]
        assert found.get("there and back", parts[0]) == parts[0]


@runs
def test_a_graph_holds_a_collective_like_a_kernel(size: int, schedule: str) -> None:
    for each in _ran(size, schedule):
        found = each["captured"]
        assert [name for name in found["kernels"] if "Copy" not in name] == ["aclnnMuls", "HcclAllReduce", "aclnnAdds"]
        assert found["got"] == [1.0 + sum(2 * (value + rank) for rank in range(size)) for value in range(3)]
        assert found["ran"] == 6
        assert not {"deadlock", "invalid", "unsupported"} & set(each["kinds"])


@runs
def test_a_rank_that_waits_elsewhere_goes_on_with_what_others_wait_for(size: int, schedule: str) -> None:
    assert [each["apart"] for each in _ran(size, schedule)] == [[float(size**2)] * 2] * size


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("sizes", "calls HcclAllReduce of 16 bytes (type 4, op 0, root 0) where rank 1 calls HcclAllReduce of 20"),
        ("gone", "rank 1 has ended or left"),
        ("late", "waits in HcclAllReduce for rank 1 for more than 1 s"),
    ],
)
def test_the_error_names_the_rank(monkeypatch: pytest.MonkeyPatch, case: str, words: str) -> None:
    monkeypatch.setenv("ASCEND_SIM_DEVICES", "2")
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "1" if case == "late" else "20")
    monkeypatch.setenv("HCCL_ASYNC_ERROR_HANDLING", "0")  # else torch_npu ends the process, whatever it does then
    errors = [each["error"] for each in launch("npu_hccl_worker", case, timeout_s=60)]
    assert words in errors[0]
    assert bool(errors[1]) is (case == "sizes")  # what rank 0 had sent before it gave up came to the late one
