"""Start and stop a job of two ranks many times, in every way in which one stops, and count what is left.

    python tools/soak/soak_ranks.py [--times 50] [--device cpu]

The ways take turns: the work is done, a rank is killed, the job gets SIGTERM or SIGINT, and the process that started
the ranks is killed. A way that leaves a process, a file or shared memory fails the run; so does a wrong exit code.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from left_behind import Traces

COMMAND = ("--max-new-tokens", "8", "--no-check", "--tp", "2", "--json", "--lowering", "inline")
_TIMEOUT_S = 240.0
_RANKS = 3
"""Processes of a job at least: the one that starts the ranks, and these."""


def _done(running: subprocess.Popen[bytes], traces: Traces) -> int:
    return running.wait(_TIMEOUT_S)


def _signalled(number: signal.Signals) -> Callable[[subprocess.Popen[bytes], Traces], int]:
    def stop(running: subprocess.Popen[bytes], traces: Traces) -> int:
        _started(running, traces)
        running.send_signal(number)
        return running.wait(_TIMEOUT_S)

    return stop


def _rank_killed(running: subprocess.Popen[bytes], traces: Traces) -> int:
    _started(running, traces)
    for rank in sorted(set(traces.processes()) - {running.pid})[-1:]:
        os.kill(rank, signal.SIGKILL)
    return running.wait(_TIMEOUT_S)


def _started(running: subprocess.Popen[bytes], traces: Traces) -> None:
    """Wait until the ranks run, and let them come a little further."""
    while running.poll() is None and len(traces.processes()) < _RANKS:
        time.sleep(0.02)
    time.sleep(1 + running.pid % 7 / 2)  # each time in another phase


WAYS: Mapping[str, tuple[Callable[[subprocess.Popen[bytes], Traces], int], int]] = MappingProxyType(
    {
        "the work is done": (_done, 0),
        "a rank is killed": (_rank_killed, 2),
        "SIGTERM": (_signalled(signal.SIGTERM), 128 + signal.SIGTERM),
        "SIGINT": (_signalled(signal.SIGINT), 128 + signal.SIGINT),
        "what started the ranks is killed": (_signalled(signal.SIGKILL), -signal.SIGKILL),
    }
)
"""How a job stops -> what does that, and the exit code that it then has."""


def start_and_stop(way: str, device: str) -> tuple[float, list[str]]:
    """Run one job and stop it; return the seconds it took, and what is wrong."""
    stop, wanted = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        traces = Traces(Path(folder) / "made")
        start = time.monotonic()
        running = subprocess.Popen(
            [sys.executable, "-m", "core", "run", "--device", device, *COMMAND],
            env={**os.environ, "TMPDIR": str(traces.folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            code = stop(running, traces)
        finally:
            running.kill()
        took = time.monotonic() - start
        wrong = traces.settled()
    return took, wrong if code in (wanted, 0) else [f"exit code {code}, not {wanted}", *wrong]


def main(
    times: Annotated[int, typer.Option(min=1, help="Starts and stops.")] = 50,
    device: Annotated[str, typer.Option(help="What the ranks run on.")] = "cpu",
) -> None:
    """Start and stop, and report by way."""
    seconds: dict[str, list[float]] = {}
    faults: list[str] = []
    for number in range(times):
        way = list(WAYS)[number % len(WAYS)]
        took, wrong = start_and_stop(way, device)
        seconds.setdefault(way, []).append(took)
        faults += [f"start {number + 1}, {way}: {each}" for each in wrong]
        print(f"{number + 1} of {times}, {way}: {took:.1f} s{''.join(f'; {each}' for each in wrong)}", flush=True)
    for way, found in seconds.items():
        print(f"{way}: {len(found)} times, median {statistics.median(found):.1f} s")
    print(f"{times} starts and stops, {len(faults)} faults")
    if faults:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
