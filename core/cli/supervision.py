"""Runs a command in a child process, so that a plugin that ends its process can't end a command silently.

A plugin's hook may call `os._exit(0)` or `abort()`: no handler of that process runs, and its exit code may say success.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

from core.errors import CoreError
from core.host.loading import plugin_error
from core.host.trail import Trail
from core.host.workers.process import ending

_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_BY_KERNEL = 0x80  # SI_KERNEL: typed at the terminal, which signals the child too
_PR_SET_PDEATHSIG = 1


def supervised(work: Callable[[], int], report: Callable[[CoreError], None]) -> int:
    """Do the work in a forked process and return its exit code; both processes return from here.

    Where that process ends before the work does, `report` is given the error that names the plugin, and 2 is returned.
    No thread may run yet.
    """
    trail = Trail()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    parent, child = os.getpid(), os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end_with(parent)
        trail.follow()
        try:
            return work()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # the interpreter reports a closed pipe
                    stream.flush()
            trail.finish()
    code = _ended(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if trail.finished and code >= 0:
        return code
    if -code in _FORWARDED:
        # End this process by the same signal, so that its sender sees that.
        signal.signal(-code, signal.SIG_DFL)
        os.kill(parent, -code)
    report(_error(trail, code))
    return 2


def end_with(parent: int) -> None:
    """Ask the kernel to end this process with its parent; if it can't, an orphan runs to its own end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _ended(child: int) -> int:
    """Wait for the child, handing signals on; return its exit code, a negative one for a signal's number."""
    while True:
        received = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        if received.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        elif received.si_code != _BY_KERNEL:
            os.kill(child, received.si_signo)


def _error(trail: Trail, code: int) -> CoreError:
    found = trail.running
    if found is not None and found.what:
        return plugin_error(found.plugin, f"{found.what} {_phrase(code)}")
    asked = f"core {' '.join(sys.argv[1:])}"
    where = (
        f"plugin {found.plugin} of device {found.plugin.device!r} was in use" if found else "no plugin was in use yet"
    )
    when = "after its work was done" if trail.finished else "before its work was done"
    remedy = "run it with `--device cpu` to see whether the device is at fault"
    return CoreError(asked, found=f"the process {ending(code)} {when}; {where}", remedy=remedy)


def _phrase(code: int) -> str:
    return f"{ending(code)}, and the process with it" if code < 0 else f"ended the process with exit code {code}"
