"""The process of a peer: says what its environment lacks, becomes warm for a cell, and times its own steps.

It runs under any Python that has `core` and what the peer requires; it imports nothing of `core` that needs a torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from core.bench.peers.requirements import lacking, versions
from core.common.peers import MakeRunner, PeerRunner, PeerWork

_SETTLE_S = 0.01
"""Threads of OpenMP and of other pools spin for some milliseconds after their last work: they would meet the next
subject, as those of the last subject would meet this one."""
_held: dict[str, PeerRunner] = {}


def answer(request: Mapping[str, Any]) -> dict[str, object]:
    """Answer `lacks` (requires), `open` (runner, work), `run` (count) or `end`; an error's text is `error`."""
    try:
        return _ANSWERS[request["op"]](request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


def _lacks(request: Mapping[str, Any]) -> dict[str, object]:
    return {"lacks": lacking(request["requires"])}


def _open(request: Mapping[str, Any]) -> dict[str, object]:
    module, _, name = request["runner"].partition(":")
    make: MakeRunner = getattr(import_module(module), name)
    work = request["work"]
    start = time.perf_counter()
    runner = _held["runner"] = make(PeerWork(**{**work, "folder": Path(work["folder"])}))
    return {
        "tokens": runner.tokens,
        "start_s": time.perf_counter() - start,
        "versions": versions(["torch", "transformers", *request["requires"]]),
        "notes": runner.notes,
    }


def _run(request: Mapping[str, Any]) -> dict[str, object]:
    runner = _held["runner"]
    runner.ready()
    time.sleep(_SETTLE_S)
    start = time.perf_counter()
    tokens = runner.run(int(request["count"]))
    seconds = time.perf_counter() - start if runner.elapsed is None else runner.elapsed()
    time.sleep(_SETTLE_S)
    return {"tokens": tokens, "seconds": seconds}


def _end(request: Mapping[str, Any]) -> dict[str, object]:
    _held.pop("runner").end()
    return {}


_ANSWERS = {"lacks": _lacks, "open": _open, "run": _run, "end": _end}
