"""core/host/selection.py and core/host/loading.py: selection, validation, blame, and what `auto` says."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import core
from core.common.graphs.backend import CallBackend
from core.errors import (
    DeviceUnavailableError,
    PluginConflictError,
    PluginError,
    PluginVersionError,
    UnknownDeviceError,
    UsageError,
)
from core.host.selection import conformance_profile

InstallVendor = Callable[..., Any]

OPENS = "@hookimpl\ndef core_open_device(context):\n    return parts()\n"
FULL = (Path(__file__).parents[1] / "data" / "full_plugin.py").read_text()
FAILS_TO_OPEN = (
    "@hookimpl\ndef core_open_device(context):\n"
    "    raise DeviceUnavailableError('device', found='card is asleep', remedy='wake it')\n"
)


def probe(count: int, reason: str = "", hint: str = "") -> str:
    fields = f"available={count > 0}, device_count={count}, reason={reason!r}, hint={hint!r}"
    return f"def probe():\n    return Probe({fields})\n"


def test_a_minimal_plugin_gets_the_defaults(install_vendor: InstallVendor) -> None:
    install_vendor(probe=None)
    device = core.select_device("acme")
    assert (device.name, str(device.plugin), device.reason) == ("acme", "acme-device 1.0", "asked for by name")
    assert device.lowerings.default == "inline"
    assert device.graph_backend is CallBackend
    assert (device.passes, device.ops, device.fakes) == ((), (), ())
    assert conformance_profile(device).not_supported == {}


def test_everything_a_plugin_registers_is_resolved(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=FULL, head="")
    device = core.select_device("acme")
    assert device.lowerings.default == "own"
    assert device.graph_backend().__class__.__name__ == "Backend"
    assert [(item.name, item.owner) for item in device.passes] == [("acme_fuse", "acme-device")]
    assert [item.name for item in device.ops] == ["acme_attention"]
    ((fake, result),) = device.fakes
    assert (fake.op, result.applied) == ("acme_absent::f", False)
    assert conformance_profile(device).not_supported == {"ops/*": "not on Acme Full"}


def test_an_entry_point_may_name_an_instance(install_vendor: InstallVendor) -> None:
    install_vendor(
        plugin="""
        class Plugin:
            @hookimpl
            def core_open_device(self, context):
                return parts()
        plugin = Plugin()
        """,
        attribute=":plugin",
    )
    assert core.select_device("acme").name == "acme"


def test_only_the_chosen_plugin_is_imported(install_vendor: InstallVendor) -> None:
    chosen = install_vendor()
    other = install_vendor(device="other", distribution="other-device")
    core.select_device("acme")
    assert f"{chosen.module}.plugin" in sys.modules
    assert f"{other.module}.plugin" not in sys.modules


@pytest.mark.cases(2)
@pytest.mark.parametrize(("name", "index", "expected"), [("acme:1", 0, 1), ("acme", 2, 2), ("acme:1", 1, 1)])
def test_the_index_reaches_the_plugin(install_vendor: InstallVendor, name: str, index: int, expected: int) -> None:
    install_vendor(
        plugin="""
        import dataclasses
        @hookimpl
        def core_open_device(context):
            capabilities = dataclasses.replace(parts().capabilities, extra={"index": context.index})
            return dataclasses.replace(parts(), capabilities=capabilities)
        """
    )
    assert core.select_device(name, index).capabilities.extra["index"] == expected


@pytest.mark.parametrize(("name", "index"), [("cpu:x", 0), ("", 0), ("cpu:", 0), ("cpu", -1), ("acme:1", 2)])
def test_a_malformed_request_is_refused(name: str, index: int) -> None:
    with pytest.raises(UsageError):
        core.select_device(name, index)


# Broken plugins: each error names distribution, version and what is wrong.


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_module", "importing it raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "importing it raised ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('bye')", "importing it raised SystemExit: bye"),
        ("", "does not implement core_open_device"),
        ("def core_open_device(context): ...", "defines core_open_device without marking it"),
        (OPENS + "@hookimpl\ndef core_register_pases(context): ...", "did you mean 'core_register_passes'?"),
        (OPENS + "@hookimpl\ndef core_lowering(ctx): ...", "ctx"),
        ("@hookimpl\ndef core_open_device(context, index=3): ...", "argument 'index' with a default"),
        ("@hookimpl\ndef core_open_device(*args): ...", "*args, which is never filled"),
        (OPENS + "@hookimpl(wrapper=True)\ndef core_lowering(context):\n    return (yield)", "is a wrapper"),
    ],
)
def test_a_broken_plugin_is_named_with_its_defect(install_vendor: InstallVendor, source: str, problem: str) -> None:
    vendor = install_vendor(plugin=source)
    with pytest.raises(PluginError) as caught:
        core.select_device("acme")
    assert f"plugin acme-device 1.0 ({vendor.module}.plugin) is broken" in caught.value.found
    assert problem in caught.value.found
    assert "acme-device" in caught.value.remedy
    assert core.select_device("cpu").name == "cpu"


def test_a_failed_import_keeps_traceback_and_place(install_vendor: InstallVendor) -> None:
    install_vendor(plugin="import no_such_module")
    with pytest.raises(PluginError, match=r"plugin\.py:\d+\)") as caught:
        core.select_device("acme")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_optional_hook_of_another_version_is_accepted(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=OPENS + "@hookimpl(optionalhook=True)\ndef core_future(context): ...")
    assert core.select_device("acme").name == "acme"


def test_an_entry_point_that_names_a_class_is_refused(install_vendor: InstallVendor) -> None:
    install_vendor(plugin="class Plugin: ...", attribute=":Plugin")
    with pytest.raises(PluginError, match="names a class"):
        core.select_device("acme")


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("hook", "result", "problem"),
    [
        ("core_open_device", "None", "None instead of core.device.DeviceParts"),
        ("core_open_device", "object()", "type object instead of core.device.DeviceParts"),
        ("core_open_device", "DeviceParts(torch_device='cpu', capabilities=3, memory=0)", "torch_device"),
        ("core_open_device", "replace(parts(), kernel_compilers='acme')", "kernel_compilers are an object of type str"),
        (
            "core_open_device",
            "replace(parts(), kernel_compilers=(3,))",
            "a sequence whose item 0 is an object of type int",
        ),
        ("core_open_device", "replace(parts(), kernel_compilers=(INDUCTOR,))", "kernel compiler 'inductor' twice"),
        (
            "core_open_device",
            "replace(parts(), kernel_compilers=(replace(INDUCTOR, name='../acme'),))",
            "kernel compiler '../acme', whose name can't be that of a folder",
        ),
        (
            "core_open_device",
            "replace(parts(), kernel_compilers=(replace(INDUCTOR, name=''),))",
            "kernel compiler '', ",
        ),
        ("core_open_device", "replace(parts(), memory=None)", "whose memory is None instead of a function"),
        ("core_open_device", "replace(parts(), synchronize=3)", "whose synchronize is an object of type int instead"),
        ("core_open_device", "replace(parts(), sleeping_memory=3)", "sleeping_memory is an object of type int instead"),
        ("core_open_device", "replace(parts(), record='x')", "whose record is an object of type str instead of a"),
        ("core_open_device", "replace(parts(), torch_device=torch.device('meta'))", "no tensor can be made and read"),
        ("core_open_device", "with_capability(dtypes=None)", "Capabilities whose dtypes is None instead of Set"),
        ("core_open_device", "with_capability(dtypes={'fp32'})", "dtypes hold an object of type str instead of torch"),
        ("core_open_device", "with_capability(update=1)", "whose update is an object of type int instead of bool"),
        ("core_open_device", "with_capability(modes=['full', []])", "unknown modes ['[]']"),
        ("core_lowering", "{'inline': 1}", "type dict instead of core.common.lowering.Lowerings"),
        ("core_lowering", "Lowerings(available={}, default='x')", "default 'x' is not among []"),
        ("core_graph_backend", "3", "type int instead of a callable"),
        ("core_register_passes", "None", "None instead of a sequence of Pass"),
        ("core_register_passes", "(i for i in ())", "type generator instead of a sequence of Pass"),
        ("core_register_passes", "[Pass(name='a', run=abs)] * 2", "pass 'a' twice"),
        ("core_register_ops", "['x']", "item 0 is an object of type str instead of OpImplementation"),
        ("core_register_ops", "[OpImplementation(op='core::f', name='a', fn=abs)] * 2", "'a' of op 'core::f' twice"),
        ("core_register_fakes", "'ab'", "type str instead of a sequence of FakeOp"),
    ],
)
def test_a_wrong_result_names_the_hook(install_vendor: InstallVendor, hook: str, result: str, problem: str) -> None:
    imports = (
        "from core.common.lowering import Lowerings\nfrom core.common.passes.declaration import Pass\n"
        "from core.common.ops.implementation import OpImplementation\n"
        "from dataclasses import replace\nfrom core.common.kernel_compilers import INDUCTOR\n"
        "def with_capability(**changed):\n"
        "    return replace(parts(), capabilities=replace(parts().capabilities, **changed))\n"
    )
    opens = "" if hook == "core_open_device" else OPENS
    install_vendor(plugin=f"{imports}{opens}@hookimpl\ndef {hook}(context):\n    return {result}\n")
    with pytest.raises(PluginError) as caught:
        core.select_device("acme")
    assert f"hook {hook} returned" in caught.value.found
    assert problem in caught.value.found


def test_a_wrong_conformance_profile_names_the_hook(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=OPENS + "@hookimpl\ndef core_conformance(context):\n    return {}\n")
    with pytest.raises(PluginError, match=r"hook core_conformance returned .* instead of ConformanceProfile"):
        conformance_profile(core.select_device("acme"))


def test_a_raising_hook_is_blamed_on_its_plugin(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=OPENS + "@hookimpl\ndef core_register_ops(context):\n    raise KeyError('sm_99')\n")
    with pytest.raises(PluginError, match="hook core_register_ops raised KeyError: 'sm_99'") as caught:
        core.select_device("acme")
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert cause.__notes__ == ["raised by plugin acme-device 1.0 in hook core_register_ops"]


def test_a_malformed_fake_is_blamed_on_its_plugin(install_vendor: InstallVendor) -> None:
    source = "from core.common.fakes import FakeOp\n@hookimpl\ndef core_register_fakes(context):\n"
    install_vendor(plugin=OPENS + source + "    return [FakeOp(op='noname', rule=abs)]\n")
    with pytest.raises(PluginError, match=r"acme-device 1\.0 .*'noname'"):
        core.select_device("acme")


# Devices asked for by name.


def test_a_vendors_own_error_passes_with_notes(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=FAILS_TO_OPEN, probe=probe(0, reason="no card in slot", hint="insert it"))
    with pytest.raises(DeviceUnavailableError) as caught:
        core.select_device("acme")
    assert (caught.value.found, caught.value.remedy) == ("card is asleep", "wake it")
    assert caught.value.__notes__ == [
        "raised by plugin acme-device 1.0 in hook core_open_device",
        "the probe of plugin acme-device 1.0 says: no card in slot; insert it",
    ]


@pytest.mark.parametrize("name", ["npu", "acme"])
def test_a_device_asked_for_by_name_never_falls_back(install_vendor: InstallVendor, name: str) -> None:
    install_vendor(plugin=FAILS_TO_OPEN)
    with pytest.raises(DeviceUnavailableError):
        core.select_device(name)


def test_an_unknown_name_lists_the_known_ones_and_the_closest(install_vendor: InstallVendor) -> None:
    install_vendor()
    with pytest.raises(UnknownDeviceError) as caught:
        core.select_device("acm")
    assert "known: acme, cpu, cuda, npu, auto; did you mean 'acme'?" in caught.value.found


def test_a_blocked_device_names_the_variable(install_vendor: InstallVendor, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vendor()
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "acme-device")
    with pytest.raises(DeviceUnavailableError, match=r"plugin acme-device 1\.0 is blocked: CORE_PLUGINS_DISABLE"):
        core.select_device("acme")


def test_a_plugin_for_another_core_is_refused_before_its_import(install_vendor: InstallVendor) -> None:
    vendor = install_vendor(requires=("core>=99",), plugin="1 / 0")
    with pytest.raises(PluginVersionError, match=r"acme-device 1\.0 is incompatible: it requires core >=99"):
        core.select_device("acme")
    assert vendor.module not in sys.modules


def test_rivals_are_refused_when_asked_for(install_vendor: InstallVendor, monkeypatch: pytest.MonkeyPatch) -> None:
    install_vendor()
    install_vendor(distribution="acme-fork")
    with pytest.raises(PluginConflictError) as caught:
        core.select_device("acme")
    assert "acme-device 1.0" in caught.value.found and "acme-fork 1.0" in caught.value.found
    assert core.select_device("cpu").name == "cpu"
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "acme-fork")
    assert core.select_device("acme").plugin.distribution == "acme-device"


# auto


@pytest.fixture
def only_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the accelerators of core out, which some test machines have."""
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "cuda,npu")


@pytest.mark.usefixtures("only_vendors")
def test_auto_prefers_an_accelerator_and_explains(install_vendor: InstallVendor) -> None:
    install_vendor(device="one", distribution="one-device", probe=probe(1, "one card"))
    install_vendor(device="zwei", distribution="zwei-device", probe=probe(2, "two cards"))
    install_vendor(device="absent", distribution="absent-device", probe=probe(0, "no card", "buy one"))
    install_vendor(device="odd", distribution="odd-device", probe=None)
    device = core.select_device()
    assert device.name == "zwei"
    assert device.reason.startswith("auto chose zwei: two cards; not chosen: ")
    for part in (
        "absent (unavailable: no card)",
        "one (available, but ranked lower: 1 available",
        "odd (available, but",
    ):
        assert part in device.reason
    assert "cuda (blocked: CORE_PLUGINS_DISABLE" in device.reason
    assert device.reason.endswith("cpu (an accelerator is preferred)")


@pytest.mark.usefixtures("only_vendors")
def test_auto_breaks_ties_by_name(install_vendor: InstallVendor) -> None:
    for name in ("b", "a"):
        install_vendor(device=name, distribution=f"{name}-device", probe=probe(1))
    assert core.select_device("auto").name == "a"


@pytest.mark.usefixtures("only_vendors")
def test_auto_goes_on_loudly_when_an_available_device_does_not_open(
    install_vendor: InstallVendor, caplog: pytest.LogCaptureFixture
) -> None:
    install_vendor(device="liar", distribution="liar-device", plugin=FAILS_TO_OPEN, probe=probe(4))
    install_vendor(device="broken", distribution="broken-device", plugin="1 / 0", probe=probe(3))
    install_vendor(probe=probe(1))
    with caplog.at_level(logging.WARNING, logger="core"):
        device = core.select_device("auto")
    assert device.name == "acme"
    assert "liar (said available, did not open: card is asleep)" in device.reason
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "'liar'" in caplog.text and "ZeroDivisionError" in caplog.text


@pytest.mark.usefixtures("only_vendors")
def test_auto_ends_at_the_processor() -> None:
    device = core.select_device()
    assert device.name == "cpu"
    assert device.reason.startswith("auto chose cpu: no accelerator can be used; not chosen: cuda (blocked")


def test_auto_without_any_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "core")
    with pytest.raises(DeviceUnavailableError, match=r"cpu \(blocked: CORE_PLUGINS_DISABLE contains 'core'\)"):
        core.select_device()
