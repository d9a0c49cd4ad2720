"""The plugin of the processor, through the public door."""

from __future__ import annotations

import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import core
from core.common.graphs.backend import CallBackend
from core.errors import DeviceUnavailableError, LoweringError
from core_cpu.compiler import find_cxx_compiler, missing
from core_cpu.probe import probe, product_name
from tests.support import refused


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
    # The kernel may take cold pages meanwhile, but not that many.
    block = torch.ones(512 * 2**20, dtype=torch.uint8)
    assert parts.memory().peak_bytes >= before.used_bytes + block.numel() // 4
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


def test_the_compiler_is_the_one_that_inductor_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor takes $CXX or g++, and no other that may be there."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in ("mycxx", "clang++") else None)
    monkeypatch.setenv("CXX", "mycxx")
    assert find_cxx_compiler() == "/bin/mycxx"
    monkeypatch.setenv("CXX", "gone")
    assert missing() == "there is no C++ compiler: CXX names gone, which is not here"
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(sys, "platform", "linux")
    assert missing() == "there is no C++ compiler: Inductor takes g++, which is not here"


def test_without_the_headers_of_python_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert f"there is no {tmp_path}/Python.h" in missing()
    (tmp_path / "Python.h").touch()
    assert missing() == ""


def test_a_program_notes_that_there_is_no_compiler_unless_it_asks_for_a_lowering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)

    def notes(**options: Any) -> tuple[str, ...]:
        inputs = {"input": core.InputSpec((2, 4), torch.float32)}
        model, given = torch.nn.Linear(4, 4).eval(), core.CompileOptions(**options)
        return core.compile(model, "cpu", inputs=inputs, options=given).report().notes

    (note,) = notes()
    assert note.startswith("lowering 'inline': 'inductor' can't be used, as there is no C++ compiler: ")
    assert notes(lowering="inline") == () and notes(mode="off") == ()
    with refused(LoweringError, "'inductor'", "there is no C++ compiler", "use lowering 'inline'"):
        notes(lowering="inductor")
