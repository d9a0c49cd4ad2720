"""The NPU plugin without an NPU: what it says when something is missing, and its calls against a planted torch_npu."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from core.device import DeviceParts, PluginInfo
from core.errors import DeviceUnavailableError
from core.hookspecs import DeviceContext, OpenContext
from core.host.discovery import discover
from core.host.loading import load_plugin
from core.probe import Probe
from core.settings import Settings
from core_npu import plugin
from core_npu.runner import NPUGraphBackend


@pytest.fixture
def info() -> PluginInfo:
    (entry,) = discover(Settings()).claiming("npu")
    return entry.info


def announce(monkeypatch: pytest.MonkeyPatch, available: bool = True) -> None:
    answer = Probe(available=available, device_count=int(available), reason="planted reason", hint="planted hint")
    monkeypatch.setattr(plugin, "probe", lambda: answer)


def plant_torch_npu(monkeypatch: pytest.MonkeyPatch, *, is_available: bool = True) -> list[Any]:
    """Put a torch_npu into sys.modules; return the list of what it was asked to do."""
    asked: list[Any] = []
    event = SimpleNamespace(record=lambda: asked.append("record"), synchronize=lambda: asked.append("wait"))
    module: Any = ModuleType("torch_npu")
    module.__version__ = "2.13.0"
    module._C = SimpleNamespace(_weak_ref_tensor=lambda tensor: tensor)
    module.npu = SimpleNamespace(
        is_available=lambda: is_available,
        device_count=lambda: 2,
        set_device=asked.append,
        use_compatible_impl=lambda on: asked.append(f"compatible {on}"),
        get_device_name=lambda index: f"Ascend {index}",
        Stream=lambda: "stream",
        Event=lambda: event,
        stream=lambda stream: stream,
        synchronize=lambda index: asked.append(f"synchronize {index}"),
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda index: None,
        memory_allocated=lambda index: 3,
        max_memory_allocated=lambda index: 5,
        mem_get_info=lambda index: (2, 9),
    )
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    # torch knows the device type only once torch_npu has renamed its private one.
    monkeypatch.setattr(plugin.torch, "device", lambda kind, index: (kind, index))
    monkeypatch.setattr(plugin, "_is_simulated", lambda: False)
    return asked


def opened(info: PluginInfo, index: int = 1) -> DeviceParts:
    return plugin.core_open_device(OpenContext(plugin=info, index=index))


def test_without_an_npu_nothing_is_imported(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch, available=False)
    before = "torch_npu" in sys.modules
    with pytest.raises(DeviceUnavailableError) as caught:
        opened(info)
    assert (caught.value.found, caught.value.remedy) == ("planted reason", "planted hint")
    assert ("torch_npu" in sys.modules) is before


def test_a_torch_npu_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(DeviceUnavailableError, match="torch_npu is installed and cannot be imported") as caught:
        opened(info)
    assert isinstance(caught.value.__cause__, ImportError)
    assert torch.__version__ in caught.value.remedy


def test_a_torch_npu_without_a_device_is_named(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)
    plant_torch_npu(monkeypatch, is_available=False)
    with pytest.raises(DeviceUnavailableError, match="reports no usable NPU"):
        opened(info)


def test_the_device_asked_for_is_opened(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)
    asked = plant_torch_npu(monkeypatch)
    parts = opened(info)
    assert asked == [1, "compatible True"]
    assert parts.torch_device == ("npu", 1)
    capabilities = parts.capabilities
    assert (capabilities.device_name, capabilities.modes[0]) == ("Ascend 1", "full")
    assert capabilities.update and capabilities.asynchronous and not capabilities.extra["simulated"]
    memory = parts.memory()
    assert (memory.used_bytes, memory.total_bytes, memory.peak_bytes, memory.taken_bytes) == (3, 9, 5, 7)
    assert parts.side_stream() == "stream"
    assert parts.record is not None
    wait = parts.record()
    parts.synchronize()
    wait()
    assert asked[2:] == ["record", "synchronize 1", "wait"]


def test_an_index_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)
    plant_torch_npu(monkeypatch)
    with pytest.raises(DeviceUnavailableError, match="npu:2"):
        opened(info, 2)


def test_a_simulated_runtime_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)  # the probe saw another library than the loader took
    plant_torch_npu(monkeypatch)
    monkeypatch.setattr(plugin, "_is_simulated", lambda: True)
    monkeypatch.delenv("CORE_NPU_SIMULATED", raising=False)
    with pytest.raises(DeviceUnavailableError, match="is a simulation for tests"):
        opened(info)
    monkeypatch.setenv("CORE_NPU_SIMULATED", "1")
    capabilities = opened(info).capabilities
    assert capabilities.device_name == "Ascend 1 (simulated on the host)" and capabilities.extra["simulated"]


def test_each_program_gets_a_graph_backend_of_its_own(monkeypatch: pytest.MonkeyPatch, info: PluginInfo) -> None:
    announce(monkeypatch)
    plant_torch_npu(monkeypatch)
    factory = plugin.core_graph_backend(DeviceContext(plugin=info, parts=opened(info)))
    first, second = factory(), factory()
    assert isinstance(first, NPUGraphBackend) and first is not second


def test_a_torch_that_an_extension_breaks_is_no_fault_of_the_plugin(
    monkeypatch: pytest.MonkeyPatch, info: PluginInfo
) -> None:
    def load(self: object) -> None:
        text = "Failed to load the backend extension: torch_npu. You can disable extension auto-loading with …"
        raise RuntimeError(text) from ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr("core.host.loading.EntryPoint.load", load)
    with pytest.raises(
        DeviceUnavailableError, match="its backend extension torch_npu is installed and fails"
    ) as caught:
        load_plugin(info)
    assert "libhccl.so: cannot open" in caught.value.found
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in caught.value.remedy
