"""From the start of a process to the first token, phase by phase: in a fresh process, twice, cold and warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from core.errors import ModelError

_TIMEOUT_S = 1800


def measure_start(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return seconds by phase, and what the cache did, of a cold and a warm start.

    arguments: as `core.bench.start_worker.main` takes them. Cold is with empty caches of graphs and of compiled
    kernels, warm with those that the cold start has filled. Both find their files in the memory of the operating system
    if it holds them. Raises `ModelError` with what the process printed last where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        return {kind: _run(arguments, folder) for kind in ("cold", "warm")}


def _run(arguments: Mapping[str, Any], folder: str) -> dict[str, Any]:
    began = time.time()
    document = json.dumps({**arguments, "began": began})
    command = [sys.executable, "-m", "core.bench.start_worker", document]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "CORE_CACHE_DIR": folder},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _failed(f"no first token within {_TIMEOUT_S} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise _failed(" ".join((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-3:]))
    found: dict[str, Any] = json.loads(lines[-1])
    return {**found, "total_s": sum(found["phases"].values())}


def _failed(found: str) -> ModelError:
    return ModelError("a start in a process of its own", found=found, remedy="leave out --start, or mend this first")
