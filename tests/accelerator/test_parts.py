"""core/accelerator: what is opened of an accelerator of torch, and what is said of all that torch does not tell."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.accelerator import asked, parts
from core.accelerator.memory import AcceleratorMemory
from core.accelerator.parts import open_accelerator
from core.device import MemoryInfo
from core.errors import DeviceUnavailableError
from tests.accelerator.stand_in import install

CPU = torch.device("cpu", 0)


class Owner:
    pass


def test_it_opens_with_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch)
    opened = open_accelerator("cpu", 1)
    abilities = opened.capabilities
    assert opened.torch_device == torch.device("cpu", 1)
    assert abilities.dtypes == {torch.float32, torch.bfloat16, torch.float16, torch.float64} and abilities.fp64
    assert abilities.modes == ("full", "piecewise", "segmented")
    assert "generic: torch's own kernels" in abilities.device_name
    assert opened.memory() == MemoryInfo(used_bytes=64, total_bytes=1 << 30, peak_bytes=128, held_bytes=256)
    opened.synchronize()
    opened.empty_cache()
    opened.reset_peak_memory()
    assert stand_in.calls == ["synchronize", "empty_cache", "reset"]


def test_streams_and_events_that_fail_are_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    opened = open_accelerator("cpu")
    assert opened.capabilities.extra["no streams"] == opened.capabilities.extra["no events"] == "no streams here"
    assert opened.record is None
    with opened.side_stream():
        assert torch.ones(2).sum() == 2


def test_streams_and_events_of_the_device_are_ordered_with_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Stream:
        def __init__(self, name: object = "side") -> None:
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            log.append("enter")

        def __exit__(self, *_: object) -> None:
            log.append("exit")

    class Event:
        def __init__(self, device: torch.device) -> None: ...

        def record(self, stream: Stream) -> None:
            log.append(f"record on {stream.name}")

        def synchronize(self) -> None:
            log.append("event waited for")

    install(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream("caller"))
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    opened = open_accelerator("cpu")
    assert opened.record is not None
    log.clear()
    with pytest.raises(ZeroDivisionError), opened.side_stream():
        log.append("work")
        raise ZeroDivisionError
    assert log == ["side waits for caller", "enter", "work", "exit", "caller waits for side"]
    log.clear()
    wait = opened.record()
    assert log == ["record on caller"]
    wait()
    assert log[1:] == ["event waited for"]


@pytest.mark.parametrize("wrong", [torch.float64, torch.float16])
def test_a_dtype_that_computes_wrongly_is_left_out(monkeypatch: pytest.MonkeyPatch, wrong: torch.dtype) -> None:
    install(monkeypatch)
    compute = parts._compute

    def planted(device: torch.device, dtype: torch.dtype) -> None:
        if dtype == wrong:
            raise RuntimeError("no such kernel")
        compute(device, dtype)

    monkeypatch.setattr(parts, "_compute", planted)
    abilities = open_accelerator("cpu").capabilities
    assert wrong not in abilities.dtypes and len(abilities.dtypes) == 3
    assert abilities.fp64 is (wrong != torch.float64)


def test_wrong_results_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    parts._compute(CPU, torch.float64)
    monkeypatch.setattr(torch, "eye", lambda *size, dtype: torch.ones(*size, dtype=dtype))
    with pytest.raises(RuntimeError, match=r"torch.float64: wrong results"):
        parts._compute(CPU, torch.float64)


@pytest.mark.parametrize(
    ("answers", "index", "found", "to_do"),
    [
        ({"type": ""}, 0, "has no support for devices of type 'cpu': it has no accelerator here", "the extension"),
        ({"type": "meta"}, 0, "has no support for devices of type 'cpu': its accelerator here is 'meta'", "built for"),
        ({"count": 0}, 0, "has support for 'cpu', but finds no device", "driver"),
        ({"count": 2}, 2, "torch finds 2 device(s) of that type", "choose an index below 2"),
    ],
)
def test_what_is_absent_is_refused_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], index: int, found: str, to_do: str
) -> None:
    install(monkeypatch, **answers)
    with pytest.raises(DeviceUnavailableError) as caught:
        open_accelerator("cpu", index)
    assert found in caught.value.found and to_do in caught.value.remedy


def test_a_device_that_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)

    def fails(device: torch.device, dtype: torch.dtype) -> None:
        raise RuntimeError("kernel image is invalid")

    monkeypatch.setattr(parts, "_compute", fails)
    with pytest.raises(DeviceUnavailableError, match="can't compute on it: kernel image is invalid"):
        open_accelerator("cpu")


def test_a_total_that_is_not_told_is_the_hosts_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, total_bytes=None)
    opened = open_accelerator("cpu")
    memory = opened.memory()
    assert (memory.used_bytes, memory.peak_bytes, memory.held_bytes) == (64, 128, 256)
    assert memory.total_bytes > 1 << 28
    assert "the host's is taken" in str(opened.capabilities.extra["no total_memory"])


@pytest.mark.parametrize(
    "module",
    [
        {"mem_get_info": lambda index: (5, 7000)},
        {"get_device_properties": lambda index: type("Properties", (), {"total_memory": 7000})},
    ],
)
def test_a_total_that_the_module_of_the_device_tells_is_taken(
    monkeypatch: pytest.MonkeyPatch, module: dict[str, Callable[[int], object]]
) -> None:
    install(monkeypatch, total_bytes=None)
    for name, function in module.items():
        monkeypatch.setattr(torch.get_device_module(CPU), name, function, raising=False)
    memory = AcceleratorMemory(CPU)
    assert memory.read().total_bytes == 7000 and not memory.untold


def test_without_counters_the_memory_of_graphs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch, counts=None)
    memory, owner, other = AcceleratorMemory(CPU), Owner(), Owner()
    assert memory.uncounted == "Allocator is not a DeviceAllocator. further lines"
    memory.hold(owner, 100)
    memory.hold(other, 20)
    assert (memory.read().used_bytes, memory.read().peak_bytes) == (120, 120)
    del owner
    gc.collect()
    assert (memory.read().used_bytes, memory.read().peak_bytes) == (20, 120)
    memory.reset_peak()
    assert memory.read().peak_bytes == 20 and not stand_in.calls


def test_the_product_is_named_by_the_module_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.get_device_module(CPU)
    assert asked.product_name(CPU) == "cpu:0"
    properties = type("Properties", (), {"name": " Wave 1 "})
    monkeypatch.setattr(module, "get_device_properties", lambda index: properties, raising=False)
    assert asked.product_name(CPU) == "Wave 1"
    monkeypatch.setattr(module, "get_device_name", lambda index: "Wave 2", raising=False)
    assert asked.product_name(CPU) == "Wave 2"


def test_torch_knows_types_that_it_cannot_drive() -> None:
    assert asked.knows("meta") and asked.knows("mkldnn") and not asked.knows("wave") and not asked.knows("cpu:0")
