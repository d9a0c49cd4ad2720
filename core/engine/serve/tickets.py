"""The event loop's view of an `AsyncEngine`'s requests, and the delivery of outputs to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from core.engine.serve.request import RequestOutput

Receive = Callable[[RequestOutput | Exception], None]
"""Called on the event loop with each output of a request. The last call has the completion, or the error instead."""


class Ticket:
    """One request of an `AsyncEngine`; it belongs to the event loop."""

    def __init__(self, end: Callable[[Ticket], None], receive: Receive) -> None:
        """Make one for a request to come. end: asks the engine's thread to end it."""
        self._end = end
        self.receive = receive
        #: Used by the engine's thread only.
        self.request_id: int | None = None
        #: Tokens that were handed out; used by the engine's thread only.
        self.num_tokens = 0
        #: Whether its last output was received.
        self.ended = False

    def abort(self) -> None:
        """End the request now: its last output has the completion. Does nothing if the request has ended."""
        if not self.ended:
            self._end(self)


def deliver(batch: list[tuple[Ticket, RequestOutput | Exception]]) -> None:
    """Give each request its output, on the event loop; a receiver that fails keeps nothing from the others."""
    for ticket, output in batch:
        if not ticket.ended:
            ticket.ended = isinstance(output, Exception) or output.completion is not None
            try:
                ticket.receive(output)
            except Exception as error:
                about = {"message": "a receiver of an AsyncEngine failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(about)
