"""The hooks give what the contract asks for, and the probe is honest and quick."""

from __future__ import annotations

import subprocess
import sys

import pluggy
import pytest
import torch
from core.common.fakes import apply_fakes
from core.device import PluginInfo
from core.errors import DeviceUnavailableError, UsageError
from core.hookspecs import PROJECT, CoreSpec, DeviceContext, OpenContext

from core_acme import plugin
from core_acme.probe import NUM_DEVICES_VARIABLE, probe
from core_acme.runner import RecordingBackend

INFO = PluginInfo(
    device="acme",
    distribution="acme-device",
    version="0.1.0",
    entry_point="core_acme.plugin",
    probe_entry_point="core_acme.probe:probe",
    requires_core=">=0.1,<0.3",
)


def _context() -> DeviceContext:
    return DeviceContext(plugin=INFO, parts=plugin.core_open_device(OpenContext(plugin=INFO)))


def test_the_hooks_pass_validation() -> None:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(CoreSpec)
    manager.register(plugin, name="acme")
    manager.check_pending()
    context = _context()
    assert manager.hook.core_graph_backend(context=context) is RecordingBackend
    assert [len(found) for found in manager.hook.core_register_passes(context=context)] == [1]
    assert len(manager.hook.core_register_ops(context=context)[0]) == 9
    assert not manager.hook.core_conformance(context=context).not_supported


def test_the_device_opens_as_data() -> None:
    parts = _context().parts
    assert parts.torch_device == torch.device("cpu")
    assert parts.capabilities.modes == ("full", "piecewise", "segmented")
    assert parts.capabilities.update
    memory = parts.memory()
    assert 0 <= memory.used_bytes <= memory.peak_bytes <= memory.total_bytes == 16 * 2**30
    parts.synchronize()


def test_lowerings_that_the_recorder_cannot_see_are_not_offered() -> None:
    with pytest.raises(UsageError, match="this device has: inline"):
        plugin.core_lowering().resolve("inductor")


def test_a_second_device_is_refused_with_cause_and_remedy() -> None:
    with pytest.raises(DeviceUnavailableError) as caught:
        plugin.core_open_device(OpenContext(plugin=INFO, index=1))
    assert "index 1" in caught.value.asked
    assert "1 device(s)" in caught.value.found
    assert caught.value.remedy == "choose an index below 1"


def test_the_fakes_are_applied_to_the_library_that_lacks_them() -> None:
    for declared, result in apply_fakes(plugin.core_register_fakes()):
        assert result.applied, result.reason
        op = getattr(torch.ops.acme_kernels, declared.op.partition("::")[2]).default
        assert declared.samples is not None
        for sample in declared.samples(torch.device("cpu")):
            torch.library.opcheck(op, tuple(sample.kwargs.values()))


@pytest.mark.parametrize(
    ("value", "available", "phrase"),
    [("1", True, "simulated"), ("0", False, "unplugged"), ("many", False, "'many', which is neither 0 nor 1")],
)
def test_the_probe_says_what_it_found(
    value: str, available: bool, phrase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUM_DEVICES_VARIABLE, value)
    found = probe()
    assert (found.available, found.device_count) == (available, int(available))
    assert phrase in found.reason
    assert bool(found.hint) is not available


def test_opening_an_unplugged_device_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUM_DEVICES_VARIABLE, "0")
    with pytest.raises(DeviceUnavailableError, match=f"unset {NUM_DEVICES_VARIABLE}"):
        _context()


def test_the_probe_imports_no_torch() -> None:
    code = "import sys, core_acme.probe; core_acme.probe.probe(); sys.exit('torch' in sys.modules)"
    path = [entry for entry in sys.path if entry]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"], check=True)
