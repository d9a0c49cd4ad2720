"""The worker of a lane, asked by lanes.py: it collects and runs cases, and a crash stays in its process.

It imports torch on the first request alone: where that fails, the reason is an answer.
"""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING, Any

from core.errors import broken_extension, error_json
from core_conformance.case import CaseInfo
from core_conformance.runner.protocol import Collected, WorkerOptions

if TYPE_CHECKING:
    from core_conformance.runner.worker import Session


_sessions: list[Session] = []


def answer(request: dict[str, Any]) -> dict[str, object]:
    """Answer a lane: {"collect": "host" or "all"}, or {"run": id of a case, "timeout_s": what it may take}.

    Each request holds the `options` as well; the first one opens the session.
    """
    options = WorkerOptions.from_argument(request["options"])
    if not _sessions:
        try:
            _sessions.append(_session(options))
        except Exception as error:
            unloadable = broken_extension(f"device {options.device!r}", error)
            if unloadable is None or "collect" not in request:
                raise
            return Collected(cases=(), name=options.device, error=error_json(unloadable)).to_json()
    if "collect" in request:
        return _sessions[0].collect(host_only=request["collect"] == "host").to_json()
    # Shortly before the process is killed, the stacks of its threads go to its output.
    faulthandler.dump_traceback_later(0.9 * request["timeout_s"])
    outcome = _sessions[0].run(CaseInfo(id=request["run"], what=""))
    faulthandler.cancel_dump_traceback_later()
    return {"outcome": outcome.to_json(), "usable": _sessions[0].usable}


def _session(options: WorkerOptions) -> Session:
    from core_conformance.runner.worker import Session

    return Session(options, own_process=True)
