"""core_cuda/exchange.py: whose memory it is, how much, and when it goes; GPUs are played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from core.errors import CaptureError
from core_cuda import exchange, runner, symmetric
from tests.common.processes import pretended

MIB = 1 << 20


class Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream, self.device = number, torch.device("cuda", 0)


class Gpu:
    """This process's GPU: which stream is current, whether it is captured, and what was allocated and mapped."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.apart = 1, False, ""
        self.allocated: list[int] = []
        self.num_mapped = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        assert not self.capturing
        self.allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def mapped(self, mine: torch.Tensor, found: Any) -> Any:
        self.num_mapped += 1
        return self

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def barrier(self) -> None:
        raise AssertionError("nobody calls it here")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(symmetric, "allocate", made.allocate)
    monkeypatch.setattr(symmetric, "mapped", made.mapped)
    monkeypatch.setattr(symmetric, "apart", lambda group: made.apart)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(made.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    with pretended(4):
        yield made


def test_calls_of_a_stream_share_memory_that_grows_by_powers_of_two(gpu: Gpu) -> None:
    first = exchange.exchange("", 5 * MIB)
    assert first is not None and (first.rank, first.size, first.num_bytes) == (0, 4, 8 * MIB)
    assert exchange.exchange("", 8 * MIB) is first and exchange.exchange("", 1) is first
    second = exchange.exchange("", 8 * MIB + 1)
    assert second is not None and second.num_bytes == 16 * MIB and exchange.exchange("", 5 * MIB) is second
    assert gpu.allocated == [8 * MIB, 16 * MIB] and gpu.num_mapped == 2
    # Graphs that were captured with the first one may hold its address.
    assert exchange.held_bytes() == 24 * MIB


def test_little_takes_a_page(gpu: Gpu) -> None:
    found = exchange.exchange("", 1)
    assert found is not None and found.num_bytes == 2 * MIB


def test_memory_belongs_to_a_stream_and_goes_with_its_program(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    one = exchange.exchange("", 4 * MIB)
    gpu.stream = 2
    other = exchange.exchange("", 2 * MIB)
    assert other is not one and exchange.held_bytes() == 6 * MIB
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    graphs = runner.CUDAGraphs(torch.device("cuda", 0))
    graphs.release()  # it has captured nothing
    assert exchange.held_bytes() == 6 * MIB
    monkeypatch.setattr(graphs, "_stream", Stream(1))
    monkeypatch.setattr(runner, "_STREAMS", runner.defaultdict(list))
    graphs.release()
    assert exchange.held_bytes() == 2 * MIB and exchange.exchange("", 2 * MIB) is other
    assert exchange.release(2) == 2 * MIB and exchange.release(2) == 0 and exchange.held_bytes() == 0


def test_none_is_made_in_a_capture(gpu: Gpu) -> None:
    made = exchange.exchange("", 2 * MIB)
    gpu.capturing = True
    assert exchange.exchange("", 2 * MIB) is made
    with pytest.raises(CaptureError, match="run the same call once on this stream before the capture"):
        exchange.exchange("", 2 * MIB + 1)
    assert gpu.allocated == [2 * MIB]


def test_gpus_that_are_apart_share_none(gpu: Gpu) -> None:
    gpu.apart = "rank 1 is elsewhere"
    assert exchange.exchange("", 2 * MIB) is None and exchange.held_bytes() == 0


def test_areas_lie_one_behind_the_other() -> None:
    memories = tuple(torch.zeros(64, dtype=torch.uint8) for _ in range(2))
    found = exchange.Exchange(rank=1, memories=memories, barrier=lambda: None)
    found.area(0, (2, 3), torch.bfloat16, index=1).fill_(1.0)
    halves = memories[0].view(torch.bfloat16)
    assert halves.nonzero().flatten().tolist() == list(range(6, 12)) and not memories[1].any()
    whole = found.area(0, (2, 2, 3), torch.bfloat16)
    assert not whole[0].any() and bool((whole[1] == 1.0).all())
