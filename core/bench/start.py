"""Times fresh processes from start to first token, phase by phase: one cold start and one warm start."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from typing import Any

from core.errors import ModelError
from core.host.workers.worker import ask_once

_TIMEOUT_S = 1800


def measure_start(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return seconds by phase, and what the cache did, of a cold and a warm start.

    arguments: as `core.bench.start_worker.answer` takes them. Cold is with empty caches of graphs and of compiled
    kernels, warm with those that the cold start has filled. Both find their files in the memory of the operating system
    if it holds them. Raises `ModelError` with what the process printed last where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        return {kind: _run(arguments, folder) for kind in ("cold", "warm")}


def _run(arguments: Mapping[str, Any], folder: str) -> dict[str, Any]:
    payload = {**arguments, "started": time.time()}
    found = ask_once("core.bench.start_worker", payload, timeout_s=_TIMEOUT_S, CORE_CACHE_DIR=folder)
    if found.timed_out:
        raise _failed(f"no first token within {_TIMEOUT_S} s")
    if found.answer is None:
        raise _failed(" ".join((found.output.strip() or found.problem).splitlines()[-3:]))
    return {**found.answer, "total_s": sum(found.answer["phases"].values())}


def _failed(found: str) -> ModelError:
    return ModelError("a start in a process of its own", found=found, remedy="leave out --start, or mend this first")
