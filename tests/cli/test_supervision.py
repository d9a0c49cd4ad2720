"""core/cli/supervision.py: a plugin that ends its process ends no command without a word, nor with success."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.opening import CALL

InstallVendor = Callable[..., Any]

# Without torch, which none of this needs.
HEAD = "from core.hookspecs import hookimpl\n"
HOOK = "import ctypes, os, signal, sys, time\n@hookimpl\ndef core_open_device():\n    {does}\n"
COMMANDS = {
    "opening": (sys.executable, "-c", CALL, "run", "--device", "acme"),
    "run": (sys.executable, "-m", "core", "run", "--device", "acme"),
}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(params=["opening", pytest.param("run", marks=pytest.mark.slow)])
def command(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """A command that opens device acme: `core run` itself imports an engine before, seconds in each process."""
    return COMMANDS[request.param]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.mark.slow  # the next test has the same of a command that imports no engine first
def test_a_hook_that_ends_the_process_ends_no_run_with_success(install_vendor: InstallVendor) -> None:
    install_vendor(plugin=HOOK.format(does="os._exit(0)"), head=HEAD, probe=None)
    ran = run(*COMMANDS["run"])
    assert ran.returncode == 2 and "hook core_open_device ended the process with exit code 0" in ran.stderr


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("os._exit(0)", "hook core_open_device ended the process with exit code 0"),
        ("os._exit(7)", "hook core_open_device ended the process with exit code 7"),
        ("os.abort()", "hook core_open_device crashed with SIGABRT, and the process with it"),
        ("ctypes.string_at(0)", "hook core_open_device crashed with SIGSEGV, and the process with it"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "hook core_open_device crashed with SIGKILL, and the process with it"),
    ],
)
def test_a_hook_that_ends_the_process_is_named(
    install_vendor: InstallVendor, command: tuple[str, ...], does: str, told: str
) -> None:
    vendor = install_vendor(plugin=HOOK.format(does=does), head=HEAD, probe=None)
    ran = run(*command, "--json")
    assert ran.returncode == 2, ran.stderr
    error = json.loads(ran.stdout)["error"]
    assert (error["type"], error["asked"]) == ("PluginError", "device 'acme'")
    assert error["found"] == f"plugin acme-device 1.0 ({vendor.module}.plugin) is broken: {told}"
    assert "acme-device" in error["remedy"]


def test_an_import_that_ends_the_process_is_named(install_vendor: InstallVendor, command: tuple[str, ...]) -> None:
    install_vendor(plugin="import os; os._exit(0)", head="", probe=None)
    ran = run(*command)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "importing it ended the process with exit code 0" in ran.stderr


def test_an_error_of_the_plugin_is_told_once(install_vendor: InstallVendor, command: tuple[str, ...]) -> None:
    install_vendor(plugin=HOOK.format(does="raise KeyError('x')"), head=HEAD, probe=None)
    ran = run(*command)
    assert ran.returncode == 2
    assert ran.stderr.count("hook core_open_device raised KeyError: 'x'") == 1


def wait_in_hook(install_vendor: InstallVendor, folder: Path) -> Path:
    """Install a plugin whose hook writes its process id to a pipe, and then waits; return the pipe."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    does = f"open({str(pipe)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    install_vendor(plugin=HOOK.format(does=does), head=HEAD, probe=None)
    return pipe


def start_heeding(number: signal.Signals, handler: Any, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start a command that heeds a signal though this process may ignore it, as what is started ignores it in turn.

    So a shell has it for interrupts of what it starts in the background, and `nohup` for hang-ups.
    """
    before = signal.signal(number, handler)
    try:
        return subprocess.Popen(command, env=environment())
    finally:
        signal.signal(number, before)


@pytest.mark.cases(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_both_processes(
    install_vendor: InstallVendor, command: tuple[str, ...], tmp_path: Path, number: signal.Signals
) -> None:
    pipe = wait_in_hook(install_vendor, tmp_path)
    with start_heeding(number, signal.SIG_DFL, command) as started:
        child = int(pipe.read_text())
        assert child != started.pid
        started.send_signal(number)
        try:
            assert started.wait(60) == -number
        finally:
            started.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.slow
def test_an_interrupt_is_handed_on(install_vendor: InstallVendor, command: tuple[str, ...], tmp_path: Path) -> None:
    pipe = wait_in_hook(install_vendor, tmp_path)
    with start_heeding(signal.SIGINT, signal.default_int_handler, command) as started:
        pipe.read_text()
        started.send_signal(signal.SIGINT)
        try:
            assert started.wait(60) == 130
        finally:
            started.kill()  # else the end of the block waits for one that lives on


@pytest.mark.slow
def test_the_command_ends_with_the_process_that_watches_it(
    install_vendor: InstallVendor, command: tuple[str, ...], tmp_path: Path
) -> None:
    pipe = wait_in_hook(install_vendor, tmp_path)
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as started:
        pipe.read_text()
        started.kill()
        assert started.stdout is not None
        # The end of the stream comes when nobody has it open any more.
        assert started.stdout.read() == ""


def test_work_that_ends_keeps_its_exit_code_and_output() -> None:
    code = (
        "import sys; from core.cli.supervision import supervised;"
        "sys.exit(supervised(lambda: print('done') or 3, lambda error: print(error)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "done\n", "")
