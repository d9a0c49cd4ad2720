"""core_cuda/collective_linear.py: what it takes, and what GPUs give that are played by threads and by two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")
from core.common.numerics import judge
from core.common.ops.collective import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER
from core.common.ops.implementation import OpCall
from core_cuda import collective_linear
from core_cuda.collective_linear import IMPLEMENTATIONS, all_gather_linear, linear_reduce_scatter
from core_cuda.exchange import Exchange
from core_cuda.ops.registration import CODE_OF
from tests.common.processes import drawn, pretended

WORKER = Path(__file__).with_name("collective_linear_worker.py")
NUM_BYTES = 1 << 16
LINEAR = torch.nn.functional.linear


def asked(op: str = ALL_GATHER_LINEAR.qualified_name, **options: Any) -> str | None:
    ones = torch.ones(4, 4, dtype=torch.bfloat16)
    args = {"x": ones, "weight": ones, "bias": None, "group": "", "dim": 0} | options
    (one,) = (each for each in IMPLEMENTATIONS if each.op == op)
    return one.condition(OpCall(op=op, args=args))


@pytest.mark.parametrize("op", [ALL_GATHER_LINEAR.qualified_name, LINEAR_REDUCE_SCATTER.qualified_name])
def test_calls_that_it_does_not_take(op: str) -> None:
    assert asked(op) == "nobody shares the group"
    assert "x is torch.float64" in str(asked(op, x=torch.ones(4, 4, dtype=torch.float64)))
    assert asked(op, weight=torch.ones(4, 4)) == "x is torch.bfloat16, and weight torch.float32"
    assert asked(op, bias=torch.ones(4)) == "x is torch.bfloat16, and bias torch.float32"


class Gpus:
    """GPUs of a group, each a thread that waits for the others at barriers, and comes late to every third one."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memories = tuple(torch.full((NUM_BYTES,), 255, dtype=torch.uint8) for _ in range(size))
        self._meeting, self._own = threading.Barrier(size), threading.local()
        self.asked: list[int] = []
        monkeypatch.setattr(collective_linear, "exchange", self._exchange)

    def _exchange(self, group: str, num_bytes: int) -> Exchange:
        assert num_bytes <= NUM_BYTES
        self.asked.append(num_bytes)
        found: Exchange = self._own.exchange
        return found

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what each gives, by rank."""

        def one(rank: int) -> Any:
            num_barriers = 0

            def barrier() -> None:
                nonlocal num_barriers
                num_barriers += 1
                time.sleep(0.002 * (num_barriers % 3 == rank))
                self._meeting.wait(20)

            self._own.exchange = Exchange(rank=rank, memories=self.memories, barrier=barrier)
            try:
                return work(rank)
            except BaseException:
                self._meeting.abort()
                raise

        with ThreadPoolExecutor(len(self.memories)) as pool:
            return list(pool.map(one, range(len(self.memories))))


def calls(size: int, dtype: torch.dtype, rank: int) -> list[dict[str, Tensor | None]]:
    """Return calls of several sizes with weights of this rank, of which x is (tokens, 24)."""
    tokens = (4 * size, 16 * size, 8 * size, 24 * size)
    return [
        {
            "x": drawn(each, 24, dtype=dtype, seed=7 * each + rank),
            "weight": drawn(20, 24, dtype=dtype, seed=90 + rank) * 0.2,
            "bias": drawn(20, dtype=dtype, seed=50 + rank) if each > 4 * size else None,
        }
        for each in tokens
    ]


def judged(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    assert found.is_contiguous() and found.dtype == eager.dtype
    assert (verdict := judge(found, eager, exact)).passed, verdict.reason


def wide(call: dict[str, Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else each.double() for each in call.values()]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_products_are_those_of_all_rows(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls one behind the other, in the same memory: none may overwrite what a GPU that is late still reads."""
    everybodys = [calls(size, dtype, rank) for rank in range(size)]
    gpus = Gpus(size, monkeypatch)
    found = gpus.run(lambda rank: [all_gather_linear(**call, group="") for call in everybodys[rank]])
    for rank, number in product(range(size), range(len(everybodys[0]))):
        result, gathered = found[rank][number]
        call = everybodys[rank][number]
        whole = torch.cat([each[number]["x"] for each in everybodys])
        assert torch.equal(gathered, whole) and gathered.is_contiguous()
        exact = LINEAR(*wide({**call, "x": whole}))
        judged(result, LINEAR(whole, call["weight"], call["bias"]), exact)
    assert max(gpus.asked) == 24 * size * 24 * dtype.itemsize


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scattered_products_are_summed_once(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    everybodys = [calls(size, dtype, rank) for rank in range(size)]
    gpus = Gpus(size, monkeypatch)
    found = gpus.run(lambda rank: [linear_reduce_scatter(**call, group="") for call in everybodys[rank]])
    for number in range(len(everybodys[0])):
        given = [each[number] for each in everybodys]
        exact = torch.stack([LINEAR(*wide(call)) for call in given]).sum(0).chunk(size)
        eager = torch.stack([LINEAR(*call.values()) for call in given]).sum(0).chunk(size)
        for rank in range(size):
            judged(found[rank][number], eager[rank], exact[rank])
    assert max(gpus.asked) == 24 * size * 20 * dtype.itemsize


@pytest.mark.parametrize(("shape", "dim"), [((1, 4, 24), 1), ((4, 1, 24), 0), ((3, 4, 24), 1), ((2, 3, 4, 24), -2)])
def test_tokens_of_any_dimension_are_cut(shape: tuple[int, ...], dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, parts = drawn(20, 24, seed=1), [drawn(*shape, seed=5 + rank) for rank in range(2)]
    gpus = Gpus(2, monkeypatch)
    found = gpus.run(lambda rank: all_gather_linear(parts[rank], weight, None, "", dim))
    whole = torch.cat(parts, dim)
    for result, gathered in found:
        assert torch.equal(gathered, whole) and gathered.is_contiguous() and result.is_contiguous()
        torch.testing.assert_close(result, LINEAR(whole, weight))
    summed = gpus.run(lambda rank: linear_reduce_scatter(parts[rank], weight, None, "", dim))
    for rank, part in enumerate(sum(LINEAR(each, weight) for each in parts).chunk(2, dim)):
        assert summed[rank].is_contiguous()
        torch.testing.assert_close(summed[rank], part)


def test_views_are_taken_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    wide_rows, weight = [drawn(6, 72, seed=rank) for rank in range(2)], drawn(24, 20, seed=1).t()
    parts = [each[:, 24:48] for each in wide_rows]
    for result, gathered in Gpus(2, monkeypatch).run(lambda rank: all_gather_linear(parts[rank], weight, None, "")):
        assert torch.equal(gathered, torch.cat(parts))
        torch.testing.assert_close(result, LINEAR(torch.cat(parts), weight))


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: str, num_bytes: int) -> Exchange:
        raise AssertionError("memory was asked for")

    monkeypatch.setattr(collective_linear, "exchange", refuse)


@pytest.mark.usefixtures("no_memory")
def test_no_tokens_need_no_memory() -> None:
    x, weight = torch.ones(0, 24), torch.ones(20, 24)
    assert linear_reduce_scatter(x, weight, None, "").shape == (0, 20)
    assert [tuple(each.shape) for each in all_gather_linear(x, weight, None, "")] == [(0, 20), (0, 24)]


@pytest.mark.usefixtures("no_memory")
def test_kernels_asked_for_ahead_need_no_memory() -> None:
    x, weight = (torch.empty(size, 24, device="meta") for size in (6, 20))
    call = {"weight": weight, "bias": None, "group": ""}
    with pretended():
        assert CODE_OF[linear_reduce_scatter](x, **call).shape == (3, 20)
        assert [tuple(each.shape) for each in CODE_OF[all_gather_linear](x, **call)] == [(12, 20), (12, 24)]


@pytest.mark.gpu
def test_two_gpus_give_what_one_gives_in_graphs_too() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for found in json.loads(done.stdout.strip().splitlines()[-1]):
        assert found["apart"] == "" and found["num_judged"] >= 24 and found["faults"] == {}, found
        assert found["wrong_replays"] == 0 and found["wrong_when_late"] == 0, found
        assert found["held_bytes"] == [found["freed_bytes"], 0] and found["freed_bytes"] >= 8 << 20, found
        assert found["by_copies"], found
