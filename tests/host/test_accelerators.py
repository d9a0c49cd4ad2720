"""core/host/accelerators.py: a name that no plugin has, and that torch drives, is a device; all others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import core
from core import InputSpec
from core.common.graphs.recorded import RecordedBackend
from core.common.graphs.streams import StreamGraphBackend
from core.errors import DeviceUnavailableError, UnknownDeviceError
from core.host import accelerators, probing, selection
from core.host.discovery import Discovery, PluginEntry
from core.host.selection import check_name, conformance_profile, select_device
from core.host.workers.worker import WorkerResult
from core.settings import Settings
from tests.accelerator.stand_in import install

NOBODY = Discovery(entries=())
# Of the device types that have a package in torch, one that no plugin has and that this torch can't drive.
FOREIGN = "mtia"


@pytest.fixture
def unclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no plugin be installed, so that the processor's name is free for the generic device."""
    monkeypatch.setattr(selection, "discover", lambda settings: NOBODY)


@pytest.mark.usefixtures("unclaimed")
def test_an_unclaimed_accelerator_is_opened_and_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    check_name("cpu")
    device = select_device("cpu:1")
    assert (device.name, device.torch_device) == ("cpu", torch.device("cpu", 1))
    assert device.plugin.in_tree and device.plugin.entry_point == "core.accelerator.plugin"
    assert device.reason == (
        "asked for by name; generic: torch's own kernels, recorded replay, not proven on this device: "
        "run core conformance --device cpu"
    )
    assert isinstance(device.graph_backend(), RecordedBackend)
    assert not conformance_profile(device).not_supported
    with pytest.raises(DeviceUnavailableError, match="index below 2"):
        select_device("cpu", 2)


@pytest.mark.usefixtures("unclaimed")
@pytest.mark.parametrize("mode", ["full", "piecewise", "segmented", "off"])
def test_a_model_is_captured_on_it(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    with monkeypatch.context() as opening:
        install(opening)
        device = select_device("cpu")
    # Dynamo asks torch for the accelerator too, so only what the device's parts read stays.
    install(monkeypatch, only=("memory_allocated", "max_memory_allocated", "memory_reserved", "get_memory_info"))
    install(monkeypatch, only=("synchronize", "empty_cache", "reset_peak_memory_stats"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    specs = {"input": InputSpec(("tokens", 8), torch.float32)}
    with torch.no_grad(), core.compile(model, device, inputs=specs, buckets=[2, 4], mode=mode, strict=True) as program:
        for rows in (1, 2, 3, 4):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(program(input=x), model(x))


@pytest.mark.usefixtures("unclaimed")
def test_a_device_without_counters_declares_what_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, counts=None)
    (case, reason) = next(iter(conformance_profile(select_device("cpu")).not_supported.items()))
    assert case == "host/memory" and "Allocator is not a DeviceAllocator" in reason


@pytest.mark.usefixtures("unclaimed")
def test_torchs_own_graphs_are_used_only_where_they_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setenv("CORE_ACCELERATOR_GRAPHS", "torch")
    monkeypatch.setattr("core.accelerator.plugin.find_fault", lambda device: "it replays nothing")
    with pytest.raises(DeviceUnavailableError, match="it replays nothing") as caught:
        select_device("cpu")
    assert "unset CORE_ACCELERATOR_GRAPHS" in caught.value.remedy
    monkeypatch.setattr("core.accelerator.plugin.find_fault", lambda device: "")
    device = select_device("cpu")
    assert isinstance(device.graph_backend(), StreamGraphBackend)
    assert "torch.accelerator.Graph" in device.reason and "not proven" in device.reason


@pytest.mark.usefixtures("unclaimed")
def test_the_deny_list_keeps_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "cpu")
    with pytest.raises(DeviceUnavailableError, match="CORE_PLUGINS_DISABLE contains 'cpu'"):
        select_device("cpu")


def test_a_plugin_that_claims_the_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert select_device("cpu").plugin.entry_point == "core_cpu.plugin"


@pytest.mark.parametrize("ask", [select_device, check_name])
@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({"type": ""}, f"has no support for devices of type {FOREIGN!r}: it has no accelerator here"),
        ({"type": "meta"}, f"has no support for devices of type {FOREIGN!r}: its accelerator here is 'meta'"),
    ],
)
def test_a_type_that_torch_cannot_drive_is_refused(
    monkeypatch: pytest.MonkeyPatch, ask: Any, answers: dict[str, Any], found: str
) -> None:
    install(monkeypatch, **answers)
    with pytest.raises(UnknownDeviceError) as caught:
        ask(FOREIGN)
    assert "no installed plugin has that name; known: " in caught.value.found and found in caught.value.found
    assert "install a torch that was built for it" in caught.value.remedy


def test_a_type_without_a_device_is_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, type=FOREIGN, count=0)
    check_name(FOREIGN)
    with pytest.raises(DeviceUnavailableError, match=f"has support for '{FOREIGN}', but finds no device") as caught:
        select_device(FOREIGN)
    assert not isinstance(caught.value, UnknownDeviceError)


def test_a_name_that_nobody_knows_is_refused_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, type="")
    with pytest.raises(UnknownDeviceError) as caught:
        select_device("cpuu")
    assert "did you mean 'cpu'?" in caught.value.found and "torch" not in caught.value.found


def test_torch_is_asked_only_for_a_name_that_it_may_know(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, type="meta")
    with pytest.raises(UnknownDeviceError) as caught:
        select_device("cpuu")
    assert "meta" not in caught.value.found
    # An extension of torch may bring any type.
    monkeypatch.setattr(
        selection, "discover", lambda settings: Discovery(entries=(entry("cpu"),), extensions=("torch_wave",))
    )
    with pytest.raises(UnknownDeviceError, match="torch's accelerator here is 'meta'"):
        select_device("cpuu")


def test_a_torch_that_cannot_be_asked_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError("libwave.so: cannot open shared object file")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", fails)
    with pytest.raises(UnknownDeviceError, match=r"could not be asked for its accelerators: RuntimeError: libwave\.so"):
        select_device(FOREIGN)


def test_extensions_that_are_switched_off_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, type="")
    monkeypatch.setattr(
        selection, "discover", lambda settings: Discovery(entries=(entry("cpu"),), extensions=("wave",))
    )
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(UnknownDeviceError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading wave"):
        select_device("wave")


def entry(name: str) -> PluginEntry:
    return accelerators.entry_of(name, Settings())


@pytest.mark.parametrize(
    ("claimed", "extensions", "version", "autoload", "asks"),
    [
        (("cpu",), (), "cuda: Optional[str] = None\n__version__ = '1'", "", False),
        (("cpu", "wave"), (), "wave: Optional[str] = '1.0'\ngit_version = 'a'", "", False),
        (("cpu",), (), "wave: Optional[str] = '1.0'", "", True),
        (("cpu",), ("torch_wave",), "", "", True),
        (("cpu",), ("torch_wave",), "", "0", False),
        (("cpu", "wave"), ("torch_wave",), "", "", False),
        (("cpu",), (), "not Python(", "", False),
    ],
)
def test_torch_is_asked_only_where_something_may_bring_an_unclaimed_device(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    claimed: tuple[str, ...],
    extensions: tuple[str, ...],
    version: str,
    autoload: str,
    asks: bool,
) -> None:
    (tmp_path / "version.py").write_text(f"from typing import Optional\n{version}\n")
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(accelerators, "find_spec", lambda name: spec)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    found = Discovery(entries=tuple(map(entry, claimed)), extensions=extensions)
    assert accelerators.may_offer(found) is asks
    monkeypatch.setattr("sys.platform", "other")
    assert accelerators.may_offer(found), "other systems' builds of torch do not tell"


@pytest.mark.parametrize(
    ("answer", "states"),
    [
        ({"accelerator": FOREIGN, "count": 3, "problem": ""}, [(FOREIGN, "available", 3)]),
        ({"accelerator": FOREIGN, "count": 0, "problem": ""}, [(FOREIGN, "unavailable", 0)]),
        ({"accelerator": "cpu", "count": 3, "problem": ""}, []),
        ({"accelerator": "", "count": 0, "problem": ""}, []),
        ({"accelerator": "", "count": 0, "problem": "RuntimeError: no libwave.so"}, []),
        ({"odd": 1}, []),
        (None, []),
    ],
)
def test_it_is_listed_after_the_plugins(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | None, states: list[tuple[str, str, int]]
) -> None:
    monkeypatch.setattr(probing, "discover", lambda settings: Discovery(entries=(entry("cpu"),)))
    monkeypatch.setattr(accelerators, "may_offer", lambda discovery: True)
    asked: list[str] = []

    def ask(self: Any, key: str, module: str, **_: object) -> None:
        asked.append(key)
        assert module == "core.host.accelerator_worker"

    problem = "" if answer is not None else "ended with exit code 1"
    result = WorkerResult(answer=answer, problem=problem)
    monkeypatch.setattr(probing.DeviceScan, "ask", ask)
    monkeypatch.setattr(probing.DeviceScan, "results", lambda self: dict.fromkeys(asked, result))
    with probing.DeviceScan(Settings(), ask_torch=True) as scan:
        (_, *generic) = scan.statuses()
    assert [(each.plugin.device, each.state, each.device_count) for each in generic] == states
    for each in generic:
        assert f"run core conformance --device {FOREIGN}" in each.reason
        assert bool(each.hint) is (each.state == "unavailable")
        assert ("finds no device" in each.reason) is (each.state == "unavailable")
    told = problem or (answer or {}).get("problem", "")
    assert [told in line for line in scan.warnings] == [True] * bool(told)
    asked.clear()
    with probing.DeviceScan(Settings()) as quick:
        assert len(quick.statuses()) == 1, "--device auto never takes it"


def test_auto_says_that_it_left_a_generic_device_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "core:cuda,core:npu")
    install(monkeypatch, type=FOREIGN)
    device = select_device("auto")
    assert device.name == "cpu"
    assert f"{FOREIGN} (generic, not proven: opened only if asked for by name)" in device.reason
    install(monkeypatch, type=FOREIGN, count=0)
    assert FOREIGN not in select_device("auto").reason.split("not chosen: ")[-1].split()


def test_the_worker_says_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.host.accelerator_worker import answer

    install(monkeypatch, type="meta", count=4)
    assert json.loads(json.dumps(answer({}))) == {"accelerator": "meta", "count": 4, "problem": ""}

    def fails(**_: object) -> None:
        raise RuntimeError("no libwave.so")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", fails)
    assert answer({})["problem"] == "RuntimeError: no libwave.so"
