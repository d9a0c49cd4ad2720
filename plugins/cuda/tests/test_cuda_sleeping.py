"""GPU memory that sleeps: which calls of the driver follow which, on a stand-in for it, and the whole on a GPU."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import core
from core.host.selection import conformance_profile
from core_conformance.cases.host.sleeping import sleeping_memory
from core_conformance.trial import Trial
from core_cuda import sleeping
from core_cuda.sleeping import DeviceMemory

PAGE = 4096
HOST = torch.device("cpu", 0)


class StandIn:
    """Memory of the host in place of the GPU's, and an account of what is reserved and mapped."""

    granularity = PAGE

    def __init__(self, index: int) -> None:
        self.ranges: dict[int, Any] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.free_bytes = 1 << 30
        self.num_handles = 0

    def reserve(self, num_bytes: int) -> int:
        block = (ctypes.c_ubyte * (num_bytes + PAGE))()
        address = -(-ctypes.addressof(block) // PAGE) * PAGE
        self.ranges[address] = block
        return address

    def free(self, address: int, num_bytes: int) -> None:
        assert address not in self.mapped
        del self.ranges[address]

    def map(self, address: int, num_bytes: int) -> int:
        assert address in self.ranges and address not in self.mapped and num_bytes % PAGE == 0
        if num_bytes > self.free_bytes:
            raise torch.OutOfMemoryError("planted")
        self.free_bytes -= num_bytes
        self.num_handles += 1
        self.mapped[address] = num_bytes, self.num_handles
        ctypes.memset(address, 0xA5, num_bytes)
        return self.num_handles

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        assert self.mapped.pop(address) == (num_bytes, handle)
        self.free_bytes += num_bytes


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMemory]:
    def as_tensor(span: Any, device: torch.device) -> Tensor:
        about = span.__cuda_array_interface__
        kind: Any = type("Block", (ctypes.c_ubyte * about["shape"][0],), {})
        block = kind.from_address(about["data"][0])
        block.span = span
        return torch.frombuffer(block, dtype=torch.uint8)

    monkeypatch.setattr(sleeping, "Driver", StandIn)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    yield DeviceMemory(HOST)
    gc.collect()  # what tensors held goes before the patches


def stand_in(memory: DeviceMemory) -> StandIn:
    driver: Any = memory._driver
    assert isinstance(driver, StandIn)
    return driver


def test_small_tensors_share_pages_and_large_ones_have_their_own(memory: DeviceMemory) -> None:
    tensors = [memory.allocate(size) for size in (100, 513, 3 * PAGE + 1, 1)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert addresses[1] - addresses[0] == 512
    assert addresses[3] == addresses[2] + 3 * PAGE + 512
    assert sorted(size for size, _ in stand_in(memory).mapped.values()) == [PAGE, 4 * PAGE]


def test_memory_goes_and_comes_at_the_same_addresses(memory: DeviceMemory) -> None:
    driver = stand_in(memory)
    before = driver.free_bytes
    tensors = [memory.allocate(size).fill_(7) for size in (10, 5 * PAGE)]
    addresses, taken = [tensor.data_ptr() for tensor in tensors], before - driver.free_bytes
    assert taken == 6 * PAGE
    for _ in range(2):
        memory.release()
        assert driver.free_bytes == before and not driver.mapped and len(driver.ranges) == 2
        memory.restore()
        assert driver.free_bytes == before - taken
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert not bool((tensors[1] == 7).any())


def test_a_region_goes_with_its_last_tensor_asleep_or_not(memory: DeviceMemory) -> None:
    driver = stand_in(memory)
    before = driver.free_bytes
    first, second, large = memory.allocate(10), memory.allocate(10), memory.allocate(PAGE)
    del first
    assert len(driver.ranges) == 2
    memory.release()
    del second, large
    assert not driver.ranges and not driver.mapped and driver.free_bytes == before
    memory.restore()
    assert not driver.mapped
    third = memory.allocate(10)
    view = third.view(torch.int16)
    del third
    assert len(driver.mapped) == 1
    del view
    assert not driver.mapped


def test_restoring_is_all_or_nothing(memory: DeviceMemory) -> None:
    driver = stand_in(memory)
    tensors = [memory.allocate(PAGE) for _ in range(3)]
    memory.release()
    driver.free_bytes = 2 * PAGE
    with pytest.raises(torch.OutOfMemoryError):
        memory.restore()
    assert not driver.mapped and driver.free_bytes == 2 * PAGE
    driver.free_bytes = 3 * PAGE
    memory.restore()
    assert len(driver.mapped) == len(tensors)


def test_the_structures_are_laid_out_as_the_driver_reads_them() -> None:
    # cuda.h, CUDA 12 and 13: CUmemAllocationProp and CUmemAccessDesc
    assert ctypes.sizeof(sleeping._Properties) == 32
    assert sleeping._Properties.location.offset == 8
    assert sleeping._Properties.alloc_flags.offset == 24
    assert (ctypes.sizeof(sleeping._Access), sleeping._Access.flags.offset) == (12, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch")
def test_a_gpu_gives_memory_back_and_takes_it_again() -> None:
    device = core.select_device("cuda")
    make = device.parts.sleeping_memory
    assert make is not None
    trial = Trial("cuda", lambda: (device, conformance_profile(device)))
    sleeping_memory(trial)
    assert trial.failures == []
    num_bytes = 512 * 2**20
    memory = make()
    tensor = memory.allocate(num_bytes).fill_(3)
    torch.cuda.synchronize()
    awake = torch.cuda.mem_get_info()[0]
    memory.release()
    assert torch.cuda.mem_get_info()[0] - awake >= num_bytes
    memory.restore()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    for value in (5, 6):
        memory.release()
        memory.restore()
        tensor.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((tensor == value + 1).all())
