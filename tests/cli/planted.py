"""`core run --tp 2` with a rank that fails as it is told: by a `sitecustomize` that each rank imports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from left_behind import Traces

PLANTED = """
import os, signal, sys, threading, time
here = os.path.dirname(__file__)
rank, phase, kind = os.environ["PLANTED"].split()
def fail(*_):
    if kind == "memory":
        import torch
        torch.empty(1 << 60, dtype=torch.uint8)
    raise RuntimeError("planted")
class Start:
    # Strikes where the rank is about to join the others.
    def find_spec(self, name, path=None, target=None):
        if name == "core.engine.parallel.cores":
            strike()
def reached():
    file = os.path.join(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]), "phase")
    return os.path.exists(file) and open(file).read() == phase
def note():
    with open(os.path.join(here, "struck"), "w") as file:
        file.write(str(time.time()))
def strike():
    note()
    if kind == "exited":
        os._exit(0)
    if phase == "start" and kind in ("raised", "memory"):
        fail()  # in the main thread
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}.get(kind, signal.SIGUSR1))
def watch():
    while not reached():
        time.sleep(0.005)
    strike()
if os.environ.get("RANK") == rank:
    if kind == "reordered":
        import core.compilation.rewriting as rewriting
        order = tuple(reversed(rewriting.COMMON_PASSES))
        rewriting.COMMON_PASSES = tuple(each for each in order if each.name != "lift_rotary")
    else:
        signal.signal(signal.SIGUSR1, fail)
        if phase == "start":
            sys.meta_path.insert(0, Start())
        else:
            threading.Thread(target=watch, daemon=True).start()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command that was not started yet, and what it may leave behind."""

    arguments: Sequence[str]
    environment: dict[str, str]
    traces: Traces
    #: Where a rank that failed writes the time at which it did, in seconds since 1970.
    struck: Path

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(self.arguments, env=self.environment, capture_output=True, timeout=240, text=True)

    def start(self) -> subprocess.Popen[bytes]:
        """Start it."""
        return subprocess.Popen(
            self.arguments, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def command(folder: Path, fault: str, *options: str) -> Command:
    """Return a run of the embedded model on two ranks of the processor.

    folder: an empty one. fault: "RANK PHASE KIND"; "none - -" for none.
    """
    (folder / "sitecustomize.py").write_text(PLANTED)
    path = os.pathsep.join([str(folder), *(each or os.getcwd() for each in sys.path)])
    quick = ("--device", "cpu", "--mode", "off", "--max-new-tokens", "200", "--no-check", "--tp", "2", "--json")
    traces = Traces(folder / "made")
    environment = {**os.environ, "PYTHONPATH": path, "PLANTED": fault, "TMPDIR": str(traces.folder)}
    arguments = [sys.executable, "-P", "-m", "core", "run", *quick, *options]
    return Command(arguments=arguments, environment=environment, traces=traces, struck=folder / "struck")
