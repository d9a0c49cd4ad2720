"""Streams, events, memory and the order of work in the simulated runtime."""

from __future__ import annotations

import threading

import pytest
import torch

from simulator import runtime
from simulator.apart import run


def test_events_order_streams_and_answer_queries() -> None:
    first, second = torch.npu.Stream(), torch.npu.Stream()
    x = torch.ones(1000, device="npu")
    second.wait_stream(torch.npu.current_stream())
    first.wait_stream(torch.npu.current_stream())
    event = torch.npu.Event(enable_timing=True)
    with torch.npu.stream(first):
        y = x * 2
        event.record()
    second.wait_event(event)
    later = torch.npu.Event(enable_timing=True)
    with torch.npu.stream(second):
        z = y + 1
        later.record()
    later.synchronize()
    assert later.query()
    assert z.sum().item() == 3000
    assert event.elapsed_time(later) >= 0


def test_used_and_free_bytes_are_those_of_the_blocks() -> None:
    torch.npu.empty_cache()
    before = runtime.memory()
    free, total = torch.npu.mem_get_info()
    assert total - free == before.used_bytes
    x = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    assert runtime.memory().used_bytes - before.used_bytes >= x.numel()
    assert runtime.memory().peak_bytes >= runtime.memory().used_bytes
    del x
    torch.npu.empty_cache()
    assert runtime.memory().used_bytes == before.used_bytes


def test_too_much_memory_is_torchs_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_SIM_MEMORY_MB", "256")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512 << 20, dtype=torch.uint8, device="npu")
    assert torch.ones(4, device="npu").sum().item() == 4


def test_a_stream_that_waits_for_an_event_of_nobody_is_an_error() -> None:
    flag = torch.npu.ExternalEvent()
    stream = torch.npu.Stream()
    flag.wait(stream)
    with pytest.raises(RuntimeError, match="nobody writes the value"):
        stream.synchronize()


UNORDERED = """
import torch
x = torch.zeros(8, device="npu")
torch.npu.synchronize()
side = torch.npu.Stream()
with torch.npu.stream(side):
    x.add_(1)
{order}
print("seen", int((x * 1).cpu().sum()))
"""


@pytest.mark.slow
def test_the_lazy_schedule_shows_a_missing_wait() -> None:
    forgotten = UNORDERED.format(order="")
    ordered = UNORDERED.format(order="torch.npu.current_stream().wait_stream(side)")
    assert "seen 8" in run(forgotten).stdout, "tasks run at once by default"
    assert "seen 0" in run(forgotten, "--schedule", "lazy").stdout
    assert "seen 8" in run(ordered, "--schedule", "lazy").stdout


FREED = """
import torch
from simulator import runtime
from simulator.apart import run
x = torch.ones(64, device="npu")
g = torch.npu.NPUGraph()
with torch.npu.graph(g, stream=torch.npu.Stream()):
    y = x + 1
del x
torch.npu.synchronize()
torch.npu.empty_cache()
print("new memory is", torch.empty(3, device="npu").tolist())
g.replay()
torch.npu.synchronize()
"""


@pytest.mark.slow
def test_a_graph_whose_input_was_freed_fails_its_replay() -> None:
    done = run(FREED, "--poison", PYTORCH_NO_NPU_MEMORY_CACHING="1")
    assert done.returncode != 0
    assert "new memory is [nan, nan, nan]" in done.stdout
    assert "no device memory or was freed" in done.stderr


PERMISSIVE = """
import torch
from simulator import runtime
from simulator.apart import run
torch.nn.functional.avg_pool2d(torch.randn(1, 1, 4, 4).npu(), 2)
print("missing", dict(runtime.not_computed()))
"""


@pytest.mark.slow
def test_a_permissive_run_lets_a_missing_kernel_pass_and_counts_it() -> None:
    done = run(PERMISSIVE, "--permissive")
    assert "missing {'aclnnAvgPool2d'" in done.stdout, done.stderr


EXACT = """
import torch
torch.npu.use_compatible_impl({exact})
x = torch.linspace(-4, 4, 64)
off = (torch.nn.functional.gelu(x.npu()).cpu() - torch.nn.functional.gelu(x)).abs().max()
print("off", float(off))
"""


@pytest.mark.slow
def test_gelu_is_its_tanh_form_unless_compatible_kernels_are_asked_for() -> None:
    # torch_npu passes no form to the kernel that it launches by default, and decides at the first call of the process.
    assert "off 0.0\n" in run(EXACT.format(exact=True)).stdout
    assert float(run(EXACT.format(exact=False)).stdout.split()[-1]) > 1e-4


@pytest.mark.slow
def test_devices_are_as_many_as_asked_for() -> None:
    program = "import torch; print('count', torch.npu.device_count(), torch.ones(2, device='npu:1').sum().item())"
    assert "count 2 2.0" in run(program, "--devices", "2").stdout


@pytest.mark.timeout(120)
def test_a_wait_lets_the_kernels_of_another_thread_run() -> None:
    """torch_npu waits for the device with Python's lock held, and formulas of kernels are Python."""
    ended = threading.Event()

    def work() -> None:
        with torch.npu.stream(torch.npu.Stream()):
            x = torch.ones(64, 64, device="npu")
            while not ended.is_set():
                x = (x @ x) * 0.01

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(200):
        torch.npu.synchronize()
    ended.set()
    thread.join(60)
    assert not thread.is_alive()
