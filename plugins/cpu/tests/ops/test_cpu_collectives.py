"""core_cpu/csrc/collectives.cpp: sums and moves in memory that ranks share; here each rank is a thread."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import judge
from core.common.ops.implementation import OpCall
from core_cpu import collectives, shared_groups
from core_cpu.collectives import IMPLEMENTATIONS, all_gather, all_reduce, reduce_scatter
from core_cpu.shared_groups import join
from tests.common.processes import drawn, pretended

pytestmark = pytest.mark.usefixtures("kernels")

SLOT = 4096
"""Small, so that little needs many messages."""
_number = itertools.count()


class Ranks:
    """A group of threads, each with a file, a mapping and a name of its own."""

    def __init__(self, size: int, slot: int = SLOT, timeout_s: float = 60.0) -> None:
        self.names = [f"thread {next(_number)}" for _ in range(size)]
        made = os.memfd_create("core_cpu-test")
        os.ftruncate(made, shared_groups.num_bytes(size, slot))
        self.files = [
            torch.ops.core_cpu.open_group([name], self._opened(made), rank, size, slot, timeout_s)
            for rank, name in enumerate(self.names)
        ]
        os.close(made)
        self.pool = ThreadPoolExecutor(size)

    @staticmethod
    def _opened(file: int) -> int:
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)

    def run(self, call: Callable[[int, str], Any]) -> list[Any]:
        """Call with rank and group, at once in all; return results or errors in the order of ranks."""
        started = [self.pool.submit(call, rank, name) for rank, name in enumerate(self.names)]
        return [each.exception() or each.result() for each in started]

    def close(self) -> None:
        self.pool.shutdown()
        for file in self.files:
            torch.ops.core_cpu.close_group(file)


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    with ExitStack() as stack:

        def make(*args: Any, **named: Any) -> Ranks:
            made = Ranks(*args, **named)
            stack.callback(made.close)
            return made

        yield make


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def numbers(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    """Return numbers of all sizes; of integers so large that sums wrap around."""
    if dtype.is_floating_point:
        return drawn(*shape, seed=seed).to(dtype)
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=dtype)


def total(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum in the order of ranks: 16-bit floats as fp32, rounded once."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    sums = parts[0].to(wide)
    for part in parts[1:]:
        sums = sums + part.to(wide)
    return sums.to(parts[0].dtype)


SIZES = (1, 3, 17, 63, 64, 1000, SLOT // 4, SLOT // 4 + 1, 3 * SLOT + 5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", collectives.SUMMED, ids=str)
def test_every_rank_gets_the_bits_of_the_sum_in_the_order_of_ranks(
    dtype: torch.dtype, size: int, ranks: Callable[..., Ranks]
) -> None:
    group = ranks(size)
    for count in SIZES:
        parts = [numbers(dtype, count, seed=rank) for rank in range(size)]
        got = group.run(lambda rank, name, parts=parts: all_reduce(parts[rank], name))
        assert {bits(each) for each in got} == {bits(total(parts))}, count
        shards = [numbers(dtype, size, count, seed=rank) for rank in range(size)]
        got = group.run(lambda rank, name, shards=shards: reduce_scatter(shards[rank], name))
        assert bits(torch.cat(got)) == bits(total(shards)), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_short_floats_hold_the_criterion(dtype: torch.dtype, ranks: Callable[..., Ranks]) -> None:
    parts = [numbers(dtype, 50, 64, seed=rank) for rank in range(3)]
    got = ranks(3).run(lambda rank, name: all_reduce(parts[rank], name))
    eager = parts[0] + parts[1] + parts[2]
    verdict = judge(got[0], eager, torch.stack(parts).double().sum(0))
    assert verdict.passed, verdict.reason


def test_what_is_not_finite_is_the_same_on_every_rank(ranks: Callable[..., Ranks]) -> None:
    odd = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0]
    for dtype in (torch.float32, torch.bfloat16):
        pairs = torch.tensor(list(itertools.product(odd, odd)), dtype=dtype).T.contiguous()
        one, other = ranks(2).run(lambda rank, name, pairs=pairs: all_reduce(pairs[rank], name))
        assert bits(one) == bits(other)
        assert torch.equal(one.nan_to_num(7.0), (pairs[0] + pairs[1]).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn, torch.int16], ids=str)
def test_parts_are_gathered_and_scattered_along_any_dimension(dtype: torch.dtype, ranks: Callable[..., Ranks]) -> None:
    group = ranks(3)
    whole = (drawn(6, 9, 12, seed=1) * 8).round().abs().to(dtype)
    for dim in (0, 1, -1):
        parts = [part.transpose(0, 1) for part in whole.transpose(0, 1).chunk(3, dim)]
        size = whole.transpose(0, 1).shape[dim]
        got = group.run(
            lambda rank, name, parts=parts, dim=dim, size=size: all_gather(
                parts[rank].transpose(0, 1), name, dim, size if rank else None
            )
        )
        assert all(each.is_contiguous() and bits(each) == bits(whole.transpose(0, 1)) for each in got)
    for dim in (0, 1, -1):
        x = [drawn(6, 9, 12, seed=rank).transpose(0, 1) for rank in range(3)]
        got = group.run(lambda rank, name, x=x, dim=dim: reduce_scatter(x[rank], name, dim))
        assert all(each.is_contiguous() for each in got)
        assert torch.equal(torch.cat(got, dim), x[0] + x[1] + x[2])


def test_many_small_sums(ranks: Callable[..., Ranks]) -> None:
    """Each with numbers of its own: a message that is read too early or written over shows."""
    group = ranks(2)

    def many(rank: int, name: str) -> int:
        x, num_wrong = torch.empty(8), 0
        for i in range(20_000):
            x.fill_(i * (rank + 1))
            num_wrong += all_reduce(x, name)[i % 8].item() != 3 * i
        return num_wrong

    assert group.run(many) == [0, 0]


def test_nothing_is_exchanged_of_nothing(ranks: Callable[..., Ranks]) -> None:
    empty = torch.empty(0, 4)
    (got,) = {tuple(each.shape) for each in ranks(2, timeout_s=0.0).run(lambda _, name: all_reduce(empty, name))}
    assert got == (0, 4)


# --- what goes wrong


def test_ranks_that_call_different_collectives_are_told_so(ranks: Callable[..., Ranks]) -> None:
    def call(rank: int, name: str) -> Tensor:
        return all_reduce(torch.ones(4), name) if rank else all_gather(torch.ones(4, dtype=torch.bfloat16), name)

    group = ranks(2)
    first, second = map(str, group.run(call))
    assert "rank 0 of 2" in first and "waits in all_gather of 8 bytes of BFloat16 for rank 1" in first
    assert "it called all_reduce of 16 bytes of Float" in first
    assert "waits in all_reduce" in second and "it called all_gather of 8 bytes of BFloat16" in second
    (again, _) = map(str, group.run(lambda _, name: all_reduce(torch.ones(4), name)))
    assert "can't be used any more" in again and "it called all_reduce" in again


def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout(ranks: Callable[..., Ranks]) -> None:
    group = ranks(3, timeout_s=0.2)
    found = group.run(lambda rank, name: all_reduce(torch.ones(4), name) if rank != 1 else None)
    assert "for rank 1: it did not come within 0 s. It hangs, or calls other collectives." in str(found[0])
    # Rank 2 may have waited for rank 0, and is told that it gave up.
    assert found[1] is None and ("for rank 1" in str(found[2]) or "rank 0: it gave up" in str(found[2]))


def test_a_rank_that_left_is_not_waited_for(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2, timeout_s=3600.0)
    torch.ops.core_cpu.close_group(group.files[1])
    (found, _) = group.run(lambda rank, name: all_reduce(torch.ones(4), name) if rank == 0 else None)
    assert "for rank 1: its process has ended, or left the group." in str(found)


def test_other_dtypes_and_sizes_are_refused(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2, timeout_s=0.0)
    for call, words in (
        (lambda _, name: all_reduce(torch.ones(2, dtype=torch.bool), name), "sums of Bool"),
        (lambda _, name: reduce_scatter(torch.ones(3), name), "size 3, which 2 processes do not divide"),
        (lambda _, name: all_gather(torch.ones(3), name, 0, 5), "size 5 is not that of 2 parts of 3"),
    ):
        assert all(words in str(found) for found in group.run(call))
    call = next(each for each in IMPLEMENTATIONS if each.op == "core::all_reduce")
    assert call.condition(_call(torch.ones(2, dtype=torch.int16))) == (
        f"x is torch.int16, and the kernel sums {', '.join(map(str, collectives.SUMMED))}"
    )


def _call(x: Tensor) -> OpCall:
    return OpCall(op="core::all_reduce", args={"x": x, "group": ""})


def test_a_group_of_one_and_groups_of_other_backends_are_not_joined() -> None:
    assert join("") == "nobody shares the group"
    x = torch.ones(3)
    for implementation in IMPLEMENTATIONS:
        assert implementation.condition(_call(x)) == "nobody shares the group"
    assert torch.equal(all_reduce(x, ""), x)  # by the canonical op
    with pretended() as name:
        assert join(name) == join("") == f"group {name!r} has backend 'fake', not 'gloo'"


def test_shapes_are_those_of_the_canonical_ops() -> None:
    with pretended(2) as name:
        x = torch.empty(4, 6, device="meta")
        assert all_reduce(x, name).shape == (4, 6) and reduce_scatter(x, name, 1).shape == (4, 3)
        assert all_gather(x, name, 1).shape == (4, 12)
