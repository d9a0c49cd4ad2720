"""core/host/discovery.py: what distribution metadata alone tells about plugins."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from core.errors import PluginVersionError
from core.host.discovery import Discovery, PluginEntry, discover
from core.host.selection import select_device
from core.scaffold.names import range_of
from core.settings import Settings
from tests.support import refused

InstallVendor = Callable[..., Any]


def found(device: str, **settings: Any) -> PluginEntry:
    (entry,) = discover(Settings(**settings)).claiming(device)
    return entry


def test_the_plugins_of_core_are_found_and_ready() -> None:
    in_tree = [entry for entry in discover(Settings()).entries if entry.info.in_tree]
    assert [(entry.info.device, entry.verdict) for entry in in_tree] == [
        ("cpu", "ready"),
        ("cuda", "ready"),
        ("npu", "ready"),
    ]
    assert {entry.info.distribution for entry in in_tree} == {"core"}
    assert all(entry.info.probe_entry_point for entry in in_tree)


def test_a_vendor_plugin_is_described_by_its_metadata(install_vendor: InstallVendor) -> None:
    vendor = install_vendor(requires=("torch", "core>=0.1", "core<9; python_version>'3'", "core<0.0.1; extra=='old'"))
    info = found("acme").info
    assert (info.distribution, info.version, info.in_tree) == ("acme-device", "1.0", False)
    assert info.entry_point == f"{vendor.module}.plugin"
    assert info.probe_entry_point == f"{vendor.module}.probe:probe"
    assert set(info.requires_core.split(",")) == {">=0.1", "<9"}


def test_listing_imports_neither_torch_nor_a_plugin(install_vendor: InstallVendor) -> None:
    vendor = install_vendor()
    code = (
        "import core, json, sys; names = [s.plugin.device for s in core.list_devices()];"
        "print(json.dumps([names, sorted(sys.modules)]))"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    names, modules = json.loads(done.stdout)
    assert {"acme", "cpu", "cuda", "npu"} <= set(names)
    forbidden = {"torch", vendor.module, "core_cpu", "core_cuda", "core_npu"}
    assert not [name for name in modules if name.split(".")[0] in forbidden]


@pytest.mark.parametrize("requires", ["core>=99", "core[hf]==0.0.1"])
def test_a_plugin_for_another_core_is_incompatible(install_vendor: InstallVendor, requires: str) -> None:
    install_vendor(requires=(requires,))
    entry = found("acme")
    assert entry.verdict == "incompatible"
    assert entry.info.requires_core in entry.reason and "acme-device" in entry.hint


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("core_version", "verdict", "phrase"),
    [
        ("0.1.0", "incompatible", "this core is too old for it"),
        ("0.2.7", "ready", ""),
        ("0.3.0", "ready", ""),
        ("0.3.1+g1af209fdc.dirty", "ready", ""),
        ("0.4.0", "incompatible", "it was made for an older core"),
        ("1.0.0", "incompatible", "it was made for an older core"),
    ],
)
def test_a_plugin_loads_under_its_minor_version_and_the_next(
    core_version: str, verdict: str, phrase: str, install_vendor: InstallVendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise of docs/releasing.md, for a plugin whose range `core new-plugin` of core 0.2 has written."""
    install_vendor(requires=(f"core{range_of('0.2.5')}",))
    monkeypatch.setattr("core.host.discovery.__version__", core_version)
    entry = found("acme")
    assert entry.verdict == verdict and phrase in entry.reason
    if verdict == "ready":
        assert select_device("acme").capabilities.device_name == "Acme One"
    else:
        assert f"and this is core {core_version}: " in entry.reason and "acme-device" in entry.hint
        with refused(PluginVersionError, phrase):
            select_device("acme")


@pytest.mark.parametrize("requires", ["core-utils>=99", "core_metrics==7", "corex"])
def test_requirements_of_other_distributions_do_not_count(install_vendor: InstallVendor, requires: str) -> None:
    install_vendor(requires=(requires,))
    assert found("acme").verdict == "ready"


def test_an_unreadable_requirement_is_reported(install_vendor: InstallVendor) -> None:
    install_vendor(requires=("core >=>= 1",))
    entry = found("acme")
    assert entry.verdict == "broken" and "core >=>= 1" in entry.reason


def test_missing_metadata_is_reported(install_vendor: InstallVendor) -> None:
    vendor = install_vendor()
    (vendor.root / "acme_device-1.0.dist-info" / "METADATA").unlink()
    entry = found("acme")
    assert entry.verdict == "broken" and "acme_device-1.0.dist-info" in entry.reason


@pytest.mark.parametrize("device", ["auto", "a:b"])
def test_a_device_name_that_cannot_be_asked_for_is_refused(install_vendor: InstallVendor, device: str) -> None:
    install_vendor(device=device)
    broken = [entry for entry in discover(Settings()).entries if not entry.info.in_tree]
    assert [entry.verdict for entry in broken] == ["broken"]


def test_one_distribution_found_twice_counts_once(
    install_vendor: InstallVendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = install_vendor()
    copy = vendor.root.parent / "copy"
    shutil.copytree(vendor.root, copy)
    monkeypatch.syspath_prepend(str(copy))
    assert found("acme").verdict == "ready"


def two_rivals(install_vendor: InstallVendor) -> None:
    install_vendor(distribution="acme-device")
    install_vendor(distribution="acme-fork")


def test_rivals_for_one_name_are_both_refused_and_both_named(install_vendor: InstallVendor) -> None:
    two_rivals(install_vendor)
    discovery = discover(Settings())
    rivals = discovery.claiming("acme")
    assert [entry.verdict for entry in rivals] == ["conflict", "conflict"]
    for entry in rivals:
        assert "acme-device 1.0" in entry.reason and "acme-fork 1.0" in entry.reason
        assert "CORE_PLUGINS_DISABLE=acme-fork" in entry.hint
    assert [entry.verdict for entry in discovery.claiming("cpu")] == ["ready"]


def test_a_disabled_rival_leaves_the_other_working(install_vendor: InstallVendor) -> None:
    two_rivals(install_vendor)
    rivals = discover(Settings(plugins_disabled=("acme-fork",))).claiming("acme")
    assert {entry.info.distribution: entry.verdict for entry in rivals} == {
        "acme-device": "ready",
        "acme-fork": "blocked",
    }


def test_a_rival_of_an_in_tree_plugin_can_be_preferred(install_vendor: InstallVendor) -> None:
    install_vendor(device="cuda")
    assert "CORE_PLUGINS_DISABLE=core:cuda" in discover(Settings()).claiming("cuda")[0].hint
    discovery = discover(Settings(plugins_disabled=("core:cuda",)))
    assert [e.info.distribution for e in discovery.claiming("cuda") if e.verdict == "ready"] == ["acme-device"]
    assert [entry.verdict for entry in discovery.claiming("cpu")] == ["ready"]


def verdicts(discovery: Discovery) -> dict[str, str]:
    return {entry.info.device: entry.verdict for entry in discovery.entries}


def test_the_allow_list_is_about_third_parties(install_vendor: InstallVendor) -> None:
    install_vendor()
    install_vendor(device="other", distribution="other-device")
    in_tree = {"cpu": "ready", "cuda": "ready", "npu": "ready"}
    blocked = {"acme": "blocked", "other": "blocked"}
    assert verdicts(discover(Settings(plugins=()))) == {**in_tree, **blocked}
    for name in ("acme", "acme-device", "acme-device:acme"):
        assert verdicts(discover(Settings(plugins=(name,)))) == {**in_tree, **blocked, "acme": "ready"}


def test_the_deny_list_wins_and_reaches_in_tree_plugins(install_vendor: InstallVendor) -> None:
    install_vendor()
    got = verdicts(discover(Settings(plugins=("acme",), plugins_disabled=("acme-device", "npu"))))
    assert got == {"acme": "blocked", "cpu": "ready", "cuda": "ready", "npu": "blocked"}
    assert set(verdicts(discover(Settings(plugins_disabled=("core", "acme")))).values()) == {"blocked"}


def test_names_that_match_nothing_are_warned_about() -> None:
    warnings = discover(Settings(plugins=("acmee",), plugins_disabled=("cudda", "npu"))).warnings
    assert len(warnings) == 2
    assert "CORE_PLUGINS names 'acmee'" in warnings[0] and "CORE_PLUGINS_DISABLE names 'cudda'" in warnings[1]


def test_a_probe_without_a_plugin_is_warned_about(install_vendor: InstallVendor) -> None:
    vendor = install_vendor()
    entry_points = vendor.root / "acme_device-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text(entry_points.read_text() + f"acme2 = {vendor.module}.probe:probe\n")
    (warning,) = discover(Settings()).warnings
    assert "'acme2'" in warning and "acme-device 1.0" in warning
