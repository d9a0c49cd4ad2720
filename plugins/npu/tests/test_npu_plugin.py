"""The NPU plugin without an NPU: what it says when something is missing, and its calls against a planted torch_npu."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from core.common.settings import Settings
from core.device import PluginInfo
from core.discovery import discover
from core.errors import DeviceUnavailableError
from core.hookspecs import OpenContext
from core.probe import Probe
from core_npu import plugin


@pytest.fixture
def info() -> PluginInfo:
    (entry,) = discover(Settings()).claiming("npu")
    return entry.info


def announce(monkeypatch: pytest.MonkeyPatch, available: bool = True) -> None:
    answer = Probe(available=available, device_count=int(available), reason="planted reason", hint="planted hint")
    monkeypatch.setattr(plugin, "probe", lambda: answer)


def plant_torch_npu(monkeypatch: pytest.MonkeyPatch, *, is_available: bool = True) -> list[int]:
    """Put a torch_npu into sys.modules; return the list of indices it was asked to make current."""
    current: list[int] = []
    module = ModuleType("torch_npu")
    module.npu = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: is_available,
        device_count=lambda: 2,
        set_device=current.append,
        get_device_name=lambda index: f"Ascend {index}",
        Stream=lambda: "stream",
        stream=lambda stream: stream,
        synchronize=lambda index: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda index: None,
        memory_allocated=lambda index: 3,
        max_memory_allocated=lambda index: 5,
        mem_get_info=lambda index: (1, 9),
    )
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    # torch knows the device type only once torch_npu has renamed its private one.
    monkeypatch.setattr(plugin.torch, "device", lambda kind, index: (kind, index))
    return current


def test_without_an_npu_nothing_is_imported(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch, available=False)
    with pytest.raises(DeviceUnavailableError) as caught:
        plugin.core_open_device(OpenContext(plugin=info))
    assert (caught.value.found, caught.value.remedy) == ("planted reason", "planted hint")
    assert "torch_npu" not in sys.modules


def test_a_torch_npu_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(DeviceUnavailableError, match="torch_npu is installed and cannot be imported") as caught:
        plugin.core_open_device(OpenContext(plugin=info))
    assert isinstance(caught.value.__cause__, ImportError)
    assert torch.__version__ in caught.value.remedy


def test_a_torch_npu_without_a_device_is_named(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)
    plant_torch_npu(monkeypatch, is_available=False)
    with pytest.raises(DeviceUnavailableError, match="reports no usable NPU"):
        plugin.core_open_device(OpenContext(plugin=info))


def test_the_device_asked_for_is_opened(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)
    current = plant_torch_npu(monkeypatch)
    parts = plugin.core_open_device(OpenContext(plugin=info, index=1))
    assert current == [1]
    assert parts.torch_device == ("npu", 1)
    assert (parts.capabilities.device_name, parts.capabilities.modes) == ("Ascend 1", ("off",))
    memory = parts.memory()
    assert (memory.used_bytes, memory.total_bytes, memory.peak_bytes) == (3, 9, 5)


def test_an_index_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)
    plant_torch_npu(monkeypatch)
    with pytest.raises(DeviceUnavailableError, match="npu:2"):
        plugin.core_open_device(OpenContext(plugin=info, index=2))
