"""core/host/probing.py: what a probe can do wrong, and that none of it reaches the host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import PluginError
from core.host.probing import DeviceScan, DeviceStatus
from core.host.selection import select_device
from core.settings import Settings

InstallVendor = Callable[..., Any]


def status_of(device: str, timeout_s: float = 10.0) -> DeviceStatus:
    # Other plugins are irrelevant here and would only start processes.
    settings = Settings(plugins_disabled=("core",), probe_timeout_s=timeout_s)
    with DeviceScan(settings) as scan:
        (status,) = [item for item in scan.statuses() if item.plugin.device == device]
    return status


def test_a_good_probe_is_reported(install_vendor: InstallVendor) -> None:
    install_vendor()
    status = status_of("acme")
    assert (status.state, status.device_count, status.reason) == ("available", 2, "two Acme Ones")
    assert status.outcome is not None and not status.outcome.imported_torch


def test_an_unavailable_device_keeps_reason_and_hint(install_vendor: InstallVendor) -> None:
    install_vendor(
        probe="def probe():\n    return Probe(available=False, device_count=0, reason='no card', hint='buy one')\n"
    )
    status = status_of("acme")
    assert (status.state, status.device_count, status.reason, status.hint) == ("unavailable", 0, "no card", "buy one")


def test_a_plugin_without_a_probe_counts_as_available(install_vendor: InstallVendor) -> None:
    install_vendor(probe=None)
    status = status_of("acme")
    assert (status.state, status.device_count) == ("available", None)
    assert "brings no probe" in status.reason


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os\ndef probe(): os.abort()", "crashed with SIGABRT"),
        ("import ctypes\ndef probe(): ctypes.string_at(0)", "crashed with SIGSEGV"),
        ("import os\ndef probe(): os._exit(7)", "ended with exit code 7 and no answer"),
        ("def probe(): raise OSError('bad firmware')", "raised OSError: bad firmware"),
        ("import sys\ndef probe(): sys.exit(3)", "raised SystemExit: 3"),
        ("import no_such_module", "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("probe = 3", "raised TypeError"),
        ("def prob(): ...", "raised AttributeError"),
        ("def probe(): return {'available': True}", "returned dict instead of core.probe.Probe"),
        ("def probe(): return Probe(available=1, device_count=1, reason='')", "whose available is 1 instead of bool"),
        ("def probe(): return Probe(available=True, device_count=0, reason='')", "available=True with device_count=0"),
        ("def probe(): return Probe(available=False, device_count=-1, reason='')", "with device_count=-1"),
        ("def probe(): return Probe(available=True, device_count=True, reason='')", "count is True instead of int"),
    ],
)
def test_a_broken_probe_becomes_an_unavailable_device(install_vendor: InstallVendor, source: str, reason: str) -> None:
    vendor = install_vendor(probe=source)
    status = status_of("acme")
    assert status.state == "broken" and status.outcome is not None
    assert status.outcome.failed and not status.outcome.probe.available
    assert reason in status.reason and f"{vendor.module}.probe:probe" in status.reason
    assert "acme-device" in status.hint


@pytest.mark.slow
def test_a_hanging_probe_is_killed_with_its_children(install_vendor: InstallVendor, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    install_vendor(
        probe=f"""
        import pathlib, subprocess, time
        def probe():
            child = subprocess.Popen(["sleep", "60"])
            pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))
            time.sleep(60)
        """
    )
    start = time.monotonic()
    status = status_of("acme", timeout_s=1.0)
    assert time.monotonic() - start < 5
    assert "gave no answer within 1 s and was killed" in status.reason
    assert not is_running(int(pid_file.read_text()))


def is_running(pid: int) -> bool:
    # An orphan that was killed may stay a zombie for a moment, until init reaps it.
    for _ in range(50):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return False
        # The first thread is a zombie before the others have ended; a parent can't wait for the process until then.
        if fields[0] == "Z" and fields[17] == "1":
            return False
        time.sleep(0.02)
    return True


def test_what_a_probe_prints_does_not_reach_the_answer(install_vendor: InstallVendor) -> None:
    install_vendor(
        probe="""
        import ctypes, os, sys
        print("banner at import")
        def probe():
            print('{"probe": 1}')
            os.write(1, b"from descriptor 1\\n")
            ctypes.CDLL(None).puts(b"from C")
            print("x" * 200_000, file=sys.stderr)
            return Probe(available=True, device_count=1, reason="quiet")
        """
    )
    status = status_of("acme")
    assert (status.state, status.reason) == ("available", "quiet")


@pytest.mark.cases(2)
@pytest.mark.parametrize("place", ["os.fork()", "os.fork() or time.sleep(0.3)", "os.fork() and time.sleep(0.3)"])
def test_a_probe_that_forks_answers_once(install_vendor: InstallVendor, place: str) -> None:
    install_vendor(
        probe=f"""
        import os, time
        def probe():
            {place}
            return Probe(available=True, device_count=1, reason="forked")
        """
    )
    status = status_of("acme")
    assert (status.state, status.reason) == ("available", "forked")


WRITE_TO_ALL = """
import os
def probe():
    for descriptor in range(3, {end}):
        try:
            os.write(descriptor, {data!r})
        except OSError:
            pass
    return Probe(available=True, device_count=1, reason="quiet")
"""


def test_the_channel_is_out_of_the_way_of_low_descriptors(install_vendor: InstallVendor) -> None:
    install_vendor(probe=WRITE_TO_ALL.format(end=100, data=b"from a library\n"))
    assert status_of("acme").reason == "quiet"


@pytest.mark.parametrize(
    "data", [b"no answer\n", b"[1]\n", b"{}\n", b'{"probe": {"available": 1}}\n', b"\xff\n", b"[" * 100000 + b"\n"]
)
def test_a_foreign_answer_is_that_probes_problem(install_vendor: InstallVendor, data: bytes) -> None:
    install_vendor(probe=WRITE_TO_ALL.format(end=1024, data=data))
    status = status_of("acme")
    assert status.state == "broken" and status.outcome is not None and status.outcome.failed
    assert "sent something else than an answer" in status.reason


def test_reason_and_hint_are_one_printable_line(install_vendor: InstallVendor) -> None:
    text = "\x1b[31mred\x1b[0m\r\nnext\tline \x1b]0;title\x07\x1b(B\x9b1m\x00\x7f\ud800\u202eend é"
    install_vendor(probe=f"def probe(): return Probe(available=False, device_count=0, reason={text!r}, hint={text!r})")
    status = status_of("acme")
    assert status.reason == status.hint == "red next line end é"
    install_vendor(device="other", distribution="other-device", probe=f"def probe(): raise OSError({text!r})")
    assert status_of("other").reason.endswith("raised OSError: red next line end é")


def test_reason_and_hint_have_a_length(install_vendor: InstallVendor) -> None:
    install_vendor(
        probe="""
        def probe():
            print("x" * 1_000_000)
            return Probe(available=False, device_count=0, reason="y" * 3_000_000, hint="z" * 501)
        """
    )
    status = status_of("acme")
    assert (status.reason, status.hint) == ("y" * 499 + "…", "z" * 499 + "…")


def test_a_probe_that_leaves_a_child_behind_does_not_delay_the_answer(install_vendor: InstallVendor) -> None:
    install_vendor(
        probe="""
        import subprocess
        def probe():
            subprocess.Popen(["sleep", "30"])
            return Probe(available=True, device_count=1, reason="done")
        """
    )
    start = time.monotonic()
    assert status_of("acme").reason == "done"
    assert time.monotonic() - start < 5


def test_a_probe_that_imports_torch_is_told_on(install_vendor: InstallVendor) -> None:
    # A module called torch is enough, and spares the test the real one.
    vendor = install_vendor(
        probe="import torch\n" + "def probe():\n    return Probe(available=True, device_count=1, reason='')\n"
    )
    (vendor.root / "torch.py").write_text("")
    status = status_of("acme")
    assert status.outcome is not None and status.outcome.imported_torch


@pytest.mark.slow
def test_probes_run_at_the_same_time(install_vendor: InstallVendor) -> None:
    slow = (
        "import time\ndef probe():\n    time.sleep(0.7)\n    return Probe(available=True, device_count=1, reason='')\n"
    )
    for name in ("one", "two", "three"):
        install_vendor(device=name, distribution=f"{name}-device", probe=slow)
    start = time.monotonic()
    assert status_of("one").state == "available"
    assert time.monotonic() - start < 1.9


def test_leaving_the_scan_kills_running_probes(install_vendor: InstallVendor, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    install_vendor(
        probe=f"""
        import os, pathlib, time
        def probe():
            pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))
            time.sleep(60)
        """
    )
    with DeviceScan(Settings(plugins_disabled=("core",))):
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os\ndef probe(): os.abort()", "crashed with SIGABRT"),
        ("import os\ndef probe(): os._exit(0)", "ended with exit code 0 and no answer"),
        ("import time\ndef probe(): time.sleep(60)", "gave no answer within 1 s and was killed"),
    ],
)
def test_a_device_whose_probe_ends_its_process_is_not_opened(
    install_vendor: InstallVendor, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    monkeypatch.setenv("CORE_PROBE_TIMEOUT_S", "1" if "sleep" in source else "60")
    vendor = install_vendor(probe=source)
    with pytest.raises(PluginError, match="opening the device was not tried") as caught:
        select_device("acme")
    assert caught.value.found.startswith(f"plugin acme-device 1.0 ({vendor.module}.plugin) is broken: ")
    assert f"its probe {vendor.module}.probe:probe {reason}" in caught.value.found
    assert f"{vendor.module}.plugin" not in sys.modules


def test_a_probe_that_came_back_is_not_run_again(install_vendor: InstallVendor, tmp_path: Path) -> None:
    count = tmp_path / "count"
    install_vendor(
        probe=f"""
        def probe():
            open({str(count)!r}, "a").write("x")
            return Probe(available=True, device_count=1, reason="here")
        """
    )
    for _ in range(2):
        assert select_device("acme").name == "acme"
    assert count.read_text() == "x"


def test_a_probe_that_raises_keeps_no_device_from_opening(install_vendor: InstallVendor) -> None:
    install_vendor(probe="def probe(): raise OSError('no harm to a process')")
    assert select_device("acme").name == "acme"
