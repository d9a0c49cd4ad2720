"""core/engine/parallel/rank.py: each rank opens the device of its own number, and no other."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.engine.parallel.rank import _device_of_rank
from core.errors import DeviceUnavailableError
from tests.conftest import OPENS, InstallVendor

NUMBERED = """
opened = []
@hookimpl
def core_open_device(context):
    opened.append(context.index)
    if context.index >= 2:
        raise DeviceUnavailableError("device", found="there are two", remedy="ask for less")
    from dataclasses import replace
    return replace(parts(), torch_device=torch.device("cpu", context.index))
"""
COMMON = """
@hookimpl
def core_open_device(context):
    if context.index:
        raise DeviceUnavailableError("device", found="there is one", remedy="ask for that")
    return parts()
"""


def test_a_rank_touches_no_device_but_its_own(install_vendor: InstallVendor) -> None:
    """Opening one takes memory there, of the rank that it belongs to."""
    vendor = install_vendor(plugin=NUMBERED, probe=None)
    assert _device_of_rank("acme", 1).torch_device.index == 1
    module = importlib.import_module(f"{vendor.module}.plugin")
    assert module.opened == [1]


def test_a_rank_without_a_device_is_refused(install_vendor: InstallVendor, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vendor(plugin=NUMBERED, probe=None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(DeviceUnavailableError) as raised:
        _device_of_rank("acme", 2)
    assert raised.value.asked == "a device 'acme' for each of the 4 ranks of this machine"
    assert raised.value.found == "none of number 2, counted from 0: there are two"
    assert (
        "no more ranks than there are devices (--tp)" in raised.value.remedy and "ask for less" in raised.value.remedy
    )


@pytest.mark.slow
def test_a_rank_without_a_device_that_was_chosen_hears_of_that_device(
    install_vendor: InstallVendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the processor, which is tried last."""
    install_vendor(plugin=NUMBERED)
    assert _device_of_rank("auto", 1).name == "acme"
    with pytest.raises(DeviceUnavailableError, match="none of number 2, counted from 0: there are two"):
        _device_of_rank("auto", 2)


@pytest.mark.cases(2)
@pytest.mark.parametrize("local", [0, 1, 3])
def test_all_ranks_share_a_device_without_numbers(install_vendor: InstallVendor, local: int) -> None:
    install_vendor(plugin=COMMON, probe=None)
    assert _device_of_rank("acme", local).torch_device.index is None
    assert _device_of_rank("cpu", local).name == "cpu"


def test_a_device_that_opens_for_nobody_says_why(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=OPENS.replace("return parts()", "raise DeviceUnavailableError('x', found='no', remedy='')"))
    with pytest.raises(DeviceUnavailableError, match="no"):
        _device_of_rank("acme", 1)
