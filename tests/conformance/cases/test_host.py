"""core_conformance/cases/host/: an honest plugin passes level 0, and each lie is found by the case it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from core.common.conformance import ConformanceProfile
from core.device import Device, MemoryInfo
from core.host.selection import conformance_profile, select_device
from core.host.workers.worker import WorkerResult
from core_conformance.case import Case
from core_conformance.cases.host import cases as host
from core_conformance.cases.host import device as host_device
from core_conformance.runner import suite
from core_conformance.runner.isolation import TorchState
from core_conformance.trial import NotSupported, Skip, Trial

InstallVendor = Callable[..., Any]

ONE = "def probe():\n    return Probe(available=True, device_count=1, reason='an Acme One')\n"
ABSENT = "def probe():\n    return Probe(available=False, device_count=0, reason='no card', hint='buy one')\n"
CASES = {case.id.partition("/")[2]: case for case in host.CASES if "sleeping" not in case.id}

OPENS = """
import dataclasses
from core.common.conformance import ConformanceProfile
from core.common.graphs.backend import CallBackend
from core.common.ops.implementation import OpImplementation
COUNT = 1
def refuse(context):
    raise DeviceUnavailableError(f"device {context.index}", found=f"{COUNT} device(s)", remedy="choose a smaller index")
def made(parts):
    return parts
@hookimpl
def core_open_device(context):
    if context.index >= COUNT:
        refuse(context)
    return made(parts())

def capable(**fields):
    return lambda parts: dataclasses.replace(parts, capabilities=dataclasses.replace(parts.capabilities, **fields))

def having(**fields):
    return lambda parts: dataclasses.replace(parts, **fields)

class GraphBackend(CallBackend):
    def segment(self, key):
        raise NotImplementedError
    def host_arguments(self, key):
        raise NotImplementedError
    def update(self, key, step):
        raise NotImplementedError
"""


class HereAsked:
    """Runs what a worker would, in this process: importing torch anew takes seconds."""

    def __init__(self) -> None:
        self._results: dict[str, WorkerResult] = {}

    def __enter__(self) -> HereAsked:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def ask(self, key: str, module: str, *, timeout_s: float, **payload: object) -> None:
        self._results[key] = ask_here(module, payload, timeout_s=timeout_s)

    def results(self) -> dict[str, WorkerResult]:
        return self._results


def ask_here(module: str, payload: Mapping[str, object], *, timeout_s: float) -> WorkerResult:
    return WorkerResult(answer=import_module(module).answer(payload))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "Asked", HereAsked)
    monkeypatch.setattr(host, "ask_once", ask_here)


def opened(name: str) -> tuple[Device, ConformanceProfile]:
    device = select_device(name)
    return device, conformance_profile(device)


def run(case: str | Case, name: str = "acme") -> Trial:
    """Run a case of level 0 as a worker does, and return its trial; what it raises is one more failure."""
    trial = Trial(name, lambda: opened(name))
    try:
        (CASES[case] if isinstance(case, str) else case).run(trial)
    except (NotSupported, Skip):
        raise
    except Exception as error:
        trial.failures.append(f"{type(error).__name__}: {error}")
    return trial


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("here")
def test_an_honest_plugin_passes(install_vendor: InstallVendor, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(suite, "COLLECTORS", ())
    install_vendor(plugin=OPENS, probe=ONE)
    assert run(name).failures == []


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("probe", "import")])
def test_the_processor_passes(name: str) -> None:
    assert run(name, "cpu").failures == []


@pytest.mark.slow
def test_what_runs_in_workers_passes_in_workers(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=OPENS, probe=ONE)
    for name in ("probe", "import"):
        trial = run(name)
        assert trial.failures == []
        assert trial.notes


def test_every_case_says_what_it_shows() -> None:
    assert all(case.area == "host" and case.what and case.level == 0 for case in host.CASES)
    assert len(CASES) == len(host.CASES) - 1 == 13


# case -> what a plugin does wrong (source after OPENS, or arguments of install_vendor), and what the report says.
LIES: dict[str, list[tuple[Any, str]]] = {
    "metadata": [
        ({"version": "one"}, "version 'one' is none by PEP 440"),
        ({"requires": ()}, "states no range of core"),
        ({"requires": ("core>=99",)}, "incompatible: it requires core >=99"),
    ],
    "probe": [
        ({"probe": ONE.replace("count=1", "count=2")}, "the probe counts 2, and acme:1 does not open: 1 device(s)"),
        ("COUNT = 2", "the probe counts 1, and acme:1 opens too"),
        ("def refuse(context): [][context.index]", "raises PluginError instead of DeviceUnavailableError"),
        (
            "def refuse(context): raise DeviceUnavailableError('d', found='', remedy=' ')",
            "acme:1, one more than the probe counts: the error has no 'found'",
        ),
        ({"probe": "def probe(): raise OSError('bad firmware')"}, "raised OSError: bad firmware"),
        ({"probe": "import os\ndef probe(): os.abort()"}, "crashed with SIGABRT"),
        ({"probe": ONE.replace("def", "import sys; sys.modules['torch'] = sys\ndef")}, "it imports torch"),
        ({"probe": ONE.replace("an Acme One", "")}, "it gives no reason"),
        ({"probe": ABSENT.replace("buy one", "")}, "not what to do"),
        ({"probe": ABSENT}, "the probe counts 0, and acme:0 opens too"),
    ],
    "import": [
        ("torch.set_default_dtype(torch.float64)", "importing the plugin changes torch for the whole process: the def"),
        ("torch.set_grad_enabled(False)", "grad mode from True to False"),
        ("torch.set_num_threads(torch.get_num_threads() + 1)", "the number of threads"),
        ("torch.use_deterministic_algorithms(True)", "deterministic algorithms"),
        ("torch.set_default_device('meta')", "the default device from None to meta"),
        ("torch.set_float32_matmul_precision('medium')", "the precision of fp32 products"),
        (
            "def made(parts):\n    torch.set_default_dtype(torch.float16)\n    return parts",
            "opening the device changes torch for the whole process",
        ),
        ("1 / 0", "ZeroDivisionError"),
    ],
    "open": [
        (
            "import itertools\nn = itertools.count()\ndef made(p): return capable(device_name=f'A{next(n)}')(p)",
            "opened ag",
        ),
        ("made = capable(device_name=' ')", "no device_name"),
        ("made = capable(dtypes=frozenset())", "no dtype to compute in"),
        ("made = capable(dtypes=frozenset({torch.int8}))", "torch.int8 among its floating dtypes"),
        ("made = capable(extra={'cores': [1]})", "extra 'cores' is neither"),
        ("made = capable(unprofitable={'merge_linears': ''})", "without a reason: 'merge_linears'"),
        ("def made(parts): raise DeviceUnavailableError('d', found='asleep', remedy='wake it')", "asleep"),
    ],
    "hooks": [
        ("@hookimpl\ndef core_conformance():\n    return None", "core_conformance returned None"),
        (
            "@hookimpl\ndef core_register_passes():\n    return [3]",
            "core_register_passes returned a sequence whose item",
        ),
        (
            "ONLY = CallBackend()\n@hookimpl\ndef core_graph_backend():\n    return lambda: ONLY",
            "core_graph_backend gives the same backend again",
        ),
        (
            "@hookimpl\ndef core_register_ops():\n    return [OpImplementation(op='core::nrom', name='n', fn=abs)]",
            "no canonical ones: core::nrom",
        ),
        (
            "class Once(list): ...\n@hookimpl\ndef core_register_fakes():\n"
            "    if hasattr(Once, 'called'): raise OSError('only once')\n    Once.called = 1\n    return []",
            "hook core_register_fakes raised OSError: only once",
        ),
    ],
    "profile": [
        ("LIMITS = {'ops/nothing-like-it/*': 'r'}", "not_supported['ops/nothing-like-it/*'] names no case"),
        ("LIMITS = {'host/probe': ' '}", "not_supported['host/probe'] gives no reason"),
        ("UNSURE = {'aten::index_ad'}", "'aten::index_ad', which is no op"),
        ("UNSURE = {'index_add'}", "'index_add', which is no op"),
    ],
    "dtypes": [
        ("made = capable(dtypes=frozenset({torch.float32, torch.float8_e4m3fn}))", "float8_e4m3fn is declared, and"),
        ("made = capable(dtypes=frozenset({torch.float64}), fp64=False)", "fp64 is declared False"),
        ("made = having(torch_device=torch.device('meta'))", "copy out of meta tensor"),
    ],
    "memory": [
        ("made = having(memory=lambda: MemoryInfo(used_bytes=0, total_bytes=0, peak_bytes=0))", "a total of 0 bytes"),
        (
            "made = having(memory=lambda: MemoryInfo(used_bytes=-1, total_bytes=1, peak_bytes=2))",
            "-1 instead of a number of bytes",
        ),
        ("made = having(memory=lambda: MemoryInfo(used_bytes=2, total_bytes=3, peak_bytes=1))", "a peak of 1 under 2"),
        (
            "made = having(memory=lambda: MemoryInfo(used_bytes=2, total_bytes=3, peak_bytes=2, held_bytes=1))",
            "1 bytes held, 2 of them in use",
        ),
        ("made = having(memory=lambda: (0, 1, 0))", "instead of core.device.MemoryInfo"),
        (
            "USED = iter([0, 0, 2**30, 0, 0])\n"
            "made = having(memory=lambda: MemoryInfo(used_bytes=(n := next(USED)), total_bytes=2**31, peak_bytes=n))",
            "the peak of 0 bytes is below the 1073741824 that were in use since its reset",
        ),
    ],
    "modes": [
        ("made = capable(modes=('full',))", "mode 'full' is declared, and the backend is CallBackend"),
        ("made = capable(modes=('compile', 'compile'))", "a mode is declared twice"),
        (
            "made = capable(modes=('segmented',))",
            "mode 'segmented' is declared, and its backend is CallBackend, which has",
        ),
        (
            "made = capable(update=True)",
            "update is declared, and the backend is CallBackend, which has no host_arguments",
        ),
        (
            "@hookimpl\ndef core_graph_backend():\n    return list",
            "gives list, which has no capture_session, capture_one",
        ),
        ("made = capable(modes=('fastest',))", "unknown modes ['fastest']"),
    ],
    "errors": [
        ("def refuse(context): [][context.index]", "raises no DeviceUnavailableError; PluginError"),
        ("def refuse(context): raise DeviceUnavailableError('d', found='f', remedy='')", "the error has no 'remedy'"),
        ("COUNT = 10_000", "opening acme:4096: it is not refused"),
        (
            "from core.common.lowering import Lowerings, inline\nclass Any(dict):\n"
            "    def __contains__(self, name): return True\n    def __missing__(self, name): return inline\n"
            "@hookimpl\ndef core_lowering():\n    return Lowerings(available=Any(inline=inline), default='inline')",
            "an unknown lowering: it is not refused",
        ),
    ],
    "side-stream": [
        (
            "import contextlib\nmade = having(side_stream=lambda: contextlib.suppress(Exception))",
            "swallows an exception",
        ),
        (
            "import contextlib\nONE = contextlib.nullcontext\nmade = having(side_stream=lambda: 3)",
            "int instead of a context manager",
        ),
        (
            "import contextlib\n@contextlib.contextmanager\ndef once():\n    yield\n"
            "STREAM = once()\nmade = having(side_stream=lambda: STREAM)",
            "AttributeError: ",
        ),
    ],
    "synchronize": [
        (
            "import threading\nMAIN = threading.get_ident()\n"
            "made = having(synchronize=lambda: None if threading.get_ident() == MAIN else 1 / 0)",
            "on another thread it raised PluginError",
        ),
    ],
}
PROFILE = """
LIMITS, UNSURE = {}, set()
@hookimpl
def core_conformance():
    return ConformanceProfile(not_supported=LIMITS, nondeterministic_ops=frozenset(UNSURE))
"""


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("name", "lie", "found"), [(name, lie, found) for name, lies in LIES.items() for lie, found in lies]
)
@pytest.mark.usefixtures("here")
def test_a_lie_is_found(install_vendor: InstallVendor, name: str, lie: Any, found: str) -> None:
    before = TorchState.read()
    arguments = lie if isinstance(lie, dict) else {"plugin": f"{OPENS}{PROFILE if name == 'profile' else ''}\n{lie}\n"}
    try:
        install_vendor(**{"plugin": OPENS, "probe": ONE, **arguments})
        failures = run(name).failures
    finally:
        before.restore()
    assert any(found in failure for failure in failures), failures


@pytest.mark.slow
def test_a_missing_device_is_no_failure(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=OPENS.replace("COUNT = 1", "COUNT = 0"), probe=ABSENT)
    for name in sorted(CASES.keys() - {"metadata", "import", "probe"}):
        with pytest.raises(Skip, match=r"this machine has no such device: 0 device\(s\)"):
            run(name)


@pytest.mark.usefixtures("here")
def test_a_probe_that_says_no_is_held_to_it(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=OPENS.replace("COUNT = 1", "COUNT = 0"), probe=ABSENT)
    with pytest.raises(Skip, match="this machine has no such device: no card"):
        run("probe")


def test_a_plugin_without_a_probe_promises_nothing(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=OPENS.replace("COUNT = 1", "COUNT = 0"), probe=None)
    with pytest.raises(NotSupported, match="brings no probe"):
        run("probe")
    with pytest.raises(Skip):
        run("open")


def test_two_claimants_are_named(install_vendor: InstallVendor) -> None:
    install_vendor()
    install_vendor(distribution="rival-device")
    (failure,) = run("metadata").failures
    assert "acme-device 1.0" in failure and "rival-device 1.0" in failure


def test_a_range_without_an_upper_bound_is_noted(install_vendor: InstallVendor) -> None:
    install_vendor()
    assert any("no upper bound" in note for note in run("metadata").notes)
    install_vendor(device="other", distribution="other-device", requires=("core>=0.1,<0.2",))
    assert not any("no upper bound" in note for note in run("metadata", "other").notes)


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ("", ""),
        ("zero", "raises what is in use by 0"),
        ("keeps", "dropping it lowers what is in use by 0"),
        ("peak", "reset_peak_memory does not begin a new peak"),
    ],
)
def test_memory_of_a_devices_own_is_counted(install_vendor: InstallVendor, mistake: str, found: str) -> None:
    install_vendor(plugin=OPENS, probe=ONE)
    device, profile = opened("acme")
    size = host_device._PROBE_BYTES
    used = iter([0, 0 if mistake == "zero" else size, size if mistake == "keeps" else 0, 0])
    peak = [0]

    def memory() -> MemoryInfo:
        now = 2**20 + next(used)
        peak[0] = max(peak[0], now)
        return MemoryInfo(used_bytes=now, total_bytes=2**40, peak_bytes=peak[0])

    def reset() -> None:
        if mistake != "peak":
            peak[0] = 0

    # A torch device that is not the host's, and needs none there: a tensor on it takes no memory.
    parts = replace(device.parts, torch_device=torch.device("meta"), memory=memory, reset_peak_memory=reset)
    trial = Trial("acme", lambda: (replace(device, parts=parts), profile))
    host_device.memory(trial)
    assert bool(trial.failures) == bool(found)
    assert not found or any(found in failure for failure in trial.failures), trial.failures


@pytest.mark.slow
def test_a_device_that_is_promised_and_does_not_open_is_a_failure(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=OPENS.replace("COUNT = 1", "COUNT = 0"), probe=ONE)
    for name in ("open", "hooks", "collect", "memory"):
        (failure,) = run(name).failures
        assert "DeviceUnavailableError" in failure and "0 device(s)" in failure


@pytest.mark.parametrize(
    ("given", "written", "found"),
    [
        ("acme = fake_vendor", "acme = no_such_vendor", "there is no module 'no_such_vendor"),
        ("[core.probes]\nacme", "[core.probes]\nacne", "probe 'acne' of acme-device 1.0 belongs to none"),
    ],
)
def test_entry_points_that_lead_nowhere_are_found(
    install_vendor: InstallVendor, given: str, written: str, found: str
) -> None:
    vendor = install_vendor()
    (path,) = vendor.root.glob("*.dist-info/entry_points.txt")
    text = path.read_text()
    assert given in text
    path.write_text(text.replace(given, written, 1))
    assert any(found in failure for failure in run("metadata").failures), run("metadata").failures
