"""The process of a lane: `python -m core_conformance.runner.lane_worker OPTIONS`, asked by lanes.py; a crash stays in
here.

It imports torch on the first request alone: where that fails, the reason is an answer.
"""

from __future__ import annotations

import faulthandler
import sys
from typing import TYPE_CHECKING, Any

from core.errors import broken_extension, error_json
from core.host.workers.channel import serve_requests
from core_conformance.runner.protocol import Collected, WorkerOptions

if TYPE_CHECKING:
    from core_conformance.runner.worker import Session


def main(argument: str) -> None:
    """Answer the requests of a lane until it closes."""
    options = WorkerOptions.from_argument(argument)
    # The device is opened inside a request: until then standard output is not yet out of reach of a vendor's code.
    sessions: list[Session] = []

    def answer(request: dict[str, Any]) -> dict[str, object]:
        if not sessions:
            try:
                sessions.append(_session(options))
            except Exception as error:
                unloadable = broken_extension(f"device {options.device!r}", error)
                if unloadable is None or "collect" not in request:
                    raise
                return Collected(cases=(), name=options.device, error=error_json(unloadable)).to_json()
        if "collect" in request:
            return sessions[0].collect(host_only=request["collect"] == "host").to_json()
        # Shortly before the process is killed, the stacks of its threads go to its output.
        faulthandler.dump_traceback_later(0.9 * request["timeout_s"])
        outcome, usable = sessions[0].run(request["run"])
        faulthandler.cancel_dump_traceback_later()
        return {"outcome": outcome.to_json(), "usable": usable}

    serve_requests(answer)


def _session(options: WorkerOptions) -> Session:
    from core_conformance.runner.worker import Session

    return Session(options, own_process=True)


if __name__ == "__main__":
    main(sys.argv[1])
