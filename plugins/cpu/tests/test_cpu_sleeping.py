"""Host memory that sleeps: the process really holds less, and the addresses stay."""

from __future__ import annotations

import gc

import pytest
import torch

import core
from core_cpu.memory import read_memory
from core_cpu.sleeping import CAN_SLEEP, HostMemory

pytestmark = pytest.mark.skipif(not CAN_SLEEP, reason="this system drops no private pages on demand")
NUM_BYTES = 128 * 2**20


def test_pages_are_given_back_and_come_again() -> None:
    memory = HostMemory()
    tensor = memory.allocate(NUM_BYTES)
    before, address = read_memory().used_bytes, tensor.data_ptr()
    for value in (3, 4):
        tensor.fill_(value)
        filled = read_memory().used_bytes
        assert filled - before > 0.9 * NUM_BYTES
        memory.release()
        assert read_memory().used_bytes - before < 0.1 * NUM_BYTES
        memory.restore()
    tensor.fill_(5)
    assert tensor.data_ptr() == address and bool((tensor == 5).all())


def test_the_memory_goes_with_the_last_tensor_that_lies_there() -> None:
    before = read_memory().used_bytes
    memory = HostMemory()
    view = memory.allocate(NUM_BYTES).fill_(1).view(torch.int32)[3:]
    del memory
    gc.collect()
    assert int(view[0]) == 0x01010101
    del view
    gc.collect()
    assert read_memory().used_bytes - before < 0.1 * NUM_BYTES


def test_the_plugin_declares_it() -> None:
    assert core.select_device("cpu").parts.sleeping_memory is not None
