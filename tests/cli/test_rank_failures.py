"""`--tp`: every kind of failure of a rank, in every phase, ends all ranks in bounded time and is named."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from left_behind import Traces
from soak_ranks import WAYS, start_and_stop
from tests.cli.planted import command

WAITS_S = 10.0
"""`--tp-timeout` here: how long a rank waits for one that hangs."""
BOUND_S = 20.0
"""From a failure to the end of the job, beyond that wait: what ranks may still tell, SIGTERM and SIGKILL, the end of
Python, and a busy machine."""

KINDS = {
    "killed": "rank 1 crashed with SIGKILL in phase {phase}",
    "exited": "rank 1 ended with exit code 0 in phase {phase}",
    "raised": "rank 1 failed in phase {phase}: RuntimeError: planted",
    "memory": "rank 1 ran out of memory in phase {phase}: RuntimeError: ",
    "hung": "rank 1 hung in phase {phase}: rank 0 waited in vain",
}


def ended(folder: Path, fault: str) -> tuple[int, dict[str, Any], float]:
    """Run with a fault; return the exit code, the JSON, and the seconds from the fault to the end."""
    planted = command(folder, fault, "--tp-timeout", f"{WAITS_S:g}")
    done = planted.run()
    took = time.time() - float(planted.struck.read_text())
    assert planted.traces.settled() == []
    return done.returncode, json.loads(done.stdout), took


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "load", "capture", "serve"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_fails_ends_all_and_is_named(tmp_path: Path, kind: str, phase: str) -> None:
    code, document, took = ended(tmp_path, f"1 {phase} {kind}")
    assert code == 2 and document["error"]["found"].startswith(KINDS[kind].format(phase=phase))
    assert took < BOUND_S + (WAITS_S if kind == "hung" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["load", "serve"])
def test_rank_0_is_a_rank_like_others(tmp_path: Path, phase: str) -> None:
    code, document, took = ended(tmp_path, f"0 {phase} killed")
    assert code == 2 and document["error"]["found"] == f"rank 0 crashed with SIGKILL in phase {phase}"
    assert took < BOUND_S


@pytest.mark.slow
def test_ranks_whose_passes_differ_are_refused_by_name(tmp_path: Path) -> None:
    planted = command(tmp_path, "1 - reordered")
    done = planted.run()
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2 and "what to compile" in error["asked"]
    assert "order of passes" in error["found"] and "lift_rotary" in error["found"]
    assert planted.traces.settled() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    planted = command(tmp_path, "none - -")
    running = planted.start()
    while len(planted.traces.processes()) < 3:
        assert running.poll() is None
    running.send_signal(number)
    assert running.wait(60) == (130 if number == signal.SIGINT else 143)
    assert planted.traces.settled() == []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_stops_leaves_nothing(way: str) -> None:
    assert start_and_stop(way, "cpu")[1] == []


def test_what_is_left_is_found(tmp_path: Path) -> None:
    traces = Traces(tmp_path / "made")
    assert traces.found() == []
    (tmp_path / "made/core-ranks-1").mkdir()
    segment = Path("/dev/shm") / f"core-test-{tmp_path.name}"
    segment.write_bytes(b"x")
    try:
        assert traces.settled(0.1) == ["file core-ranks-1", f"shared memory {segment.name}"]
        with segment.open("rb"):  # of a process that lives
            assert traces.settled(0.1) == ["file core-ranks-1"]
    finally:
        segment.unlink()
