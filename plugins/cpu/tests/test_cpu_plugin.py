"""The plugin of the processor, through the public door."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
import torch

import core
from core.common.graphs.backend import CallBackend
from core.errors import DeviceUnavailableError
from core_cpu.plugin import find_cxx_compiler
from core_cpu.probe import probe, product_name


def test_the_probe_names_the_processor() -> None:
    answer = probe()
    assert (answer.available, answer.device_count) == (True, 1)
    assert answer.reason == product_name() != ""


def test_the_name_comes_from_cpuinfo_or_the_platform(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Acme CPU @ 2 GHz\n\nmodel name : second\n")
    assert product_name(cpuinfo) == "Acme CPU @ 2 GHz"
    assert product_name(tmp_path / "absent") in (platform.processor(), platform.machine())


def test_the_device_has_what_a_vendor_reads_about() -> None:
    device = core.select_device("cpu")
    assert device.torch_device == torch.device("cpu")
    assert device.capabilities.modes == ("compile",)
    assert torch.bfloat16 in device.capabilities.dtypes
    assert device.graph_backend is CallBackend
    device.synchronize()


def test_memory_is_counted_and_its_peak_can_be_reset() -> None:
    parts = core.select_device("cpu").parts
    before = parts.memory()
    assert 0 < before.used_bytes <= before.peak_bytes <= before.total_bytes
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert parts.memory().peak_bytes >= before.used_bytes + block.numel() // 2
    del block
    parts.reset_peak_memory()
    assert parts.memory().peak_bytes <= parts.memory().total_bytes


def test_there_is_one_processor() -> None:
    with pytest.raises(DeviceUnavailableError, match="cpu:1"):
        core.select_device("cpu:1")


def test_the_default_lowering_follows_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "g++" else None)
    device = core.select_device("cpu")
    assert device.lowerings.default == "inductor"
    assert device.capabilities.extra["cxx_compiler"] == "/bin/g++"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    device = core.select_device("cpu")
    assert device.lowerings.default == "inline"
    assert "none found" in str(device.capabilities.extra["cxx_compiler"])


def test_the_compiler_of_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "mycxx")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert find_cxx_compiler() == "/bin/mycxx"
