"""core/host/parts.py: a part of a device that fails, or returns something else, names its plugin and itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import core
from core.device import Device
from core.errors import DeviceUnavailableError, PluginError

InstallVendor = Callable[..., Any]

SOURCE = """
from dataclasses import replace
def fails(error):
    raise error
@hookimpl
def core_open_device():
    return replace(parts(), {part}={function})
"""


def opened(install_vendor: InstallVendor, part: str, function: str) -> Device:
    install_vendor(plugin=SOURCE.format(part=part, function=function), probe=None)
    return core.select_device("acme")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("lambda: None", "returned None instead of core.device.MemoryInfo"),
        ("lambda: 3", "returned an object of type int instead of core.device.MemoryInfo"),
        (
            "lambda: MemoryInfo(used_bytes=0, total_bytes='1', peak_bytes=0)",
            "returned an object of type MemoryInfo whose total_bytes is '1' instead of a number of bytes",
        ),
        (
            "lambda: MemoryInfo(used_bytes=-1, total_bytes=1, peak_bytes=0)",
            "returned an object of type MemoryInfo whose used_bytes is -1 instead of a number of bytes",
        ),
        ("lambda: fails(RuntimeError('no allocator'))", "raised RuntimeError: no allocator"),
        ("lambda unasked: 3", "raised TypeError: "),
    ],
)
def test_memory_is_tried_when_the_device_opens(install_vendor: InstallVendor, function: str, problem: str) -> None:
    with pytest.raises(PluginError, match=r"^device 'acme'") as caught:
        opened(install_vendor, "memory", function)
    assert caught.value.found.startswith("plugin acme-device 1.0 (fake_vendor_")
    assert f"is broken: part memory of its DeviceParts {problem}" in caught.value.found


@pytest.mark.parametrize(
    ("part", "function", "problem"),
    [
        ("synchronize", "lambda: fails(KeyError('queue'))", "raised KeyError: 'queue'"),
        ("empty_cache", "lambda: fails(OSError('gone'))", "raised OSError: gone"),
        ("reset_peak_memory", "lambda: 1 / 0", "raised ZeroDivisionError"),
        ("side_stream", "lambda: None", "returned None instead of a context manager"),
        ("record", "lambda: None", "returned None instead of a function that waits"),
        (
            "sleeping_memory",
            "object",
            "returned an object of type object without in_host_memory, allocate, release, restore",
        ),
        ("sleeping_memory", "lambda: fails(OSError('gone'))", "raised OSError: gone"),
    ],
)
def test_a_part_that_fails_later_is_named(
    install_vendor: InstallVendor, part: str, function: str, problem: str
) -> None:
    device = opened(install_vendor, part, function)
    with pytest.raises(PluginError, match=r"plugin acme-device 1\.0") as caught:
        getattr(device.parts, part)()
    assert f"part {part} of its DeviceParts {problem}" in caught.value.found


def test_an_error_of_the_device_keeps_its_type_and_gets_a_note(install_vendor: InstallVendor) -> None:
    device = opened(install_vendor, "synchronize", "lambda: fails(torch.OutOfMemoryError('full'))")
    with pytest.raises(RuntimeError, match="full") as caught:
        device.synchronize()
    assert caught.value.__notes__ == ["raised by plugin acme-device 1.0 in part synchronize of its DeviceParts"]


def test_a_vendors_own_error_passes_with_a_note(install_vendor: InstallVendor) -> None:
    own = "lambda: fails(DeviceUnavailableError('memory', found='asleep', remedy='wake it'))"
    with pytest.raises(DeviceUnavailableError, match="asleep") as caught:
        opened(install_vendor, "memory", own)
    assert caught.value.__notes__ == ["raised by plugin acme-device 1.0 in part memory of its DeviceParts"]
