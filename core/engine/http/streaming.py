"""Server-sent events to a client that may leave, or read slowly, or not at all; and answers nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class EventStream(Response):
    """Sends events as they come, and calls `close` at the end in every case: all sent, client gone, or client too
    slow."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], *, timeout_s: float) -> None:
        super().__init__()
        self._events, self._close, self._timeout_s = events, close, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client has gone."""
        try:
            with suppress(TimeoutError):  # close the connection, since the answer is incomplete
                await unless_gone(self._write(send), receive)
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        begun = False
        async for event in self._events:
            if event:
                if not begun:  # until its first event, a balancer may give a request to another server
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    begun = True
                # A client that does not read blocks only its own connection, not the engine, and only up to the
                # time-out.
                async with asyncio.timeout(self._timeout_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        if not begun:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(work: Awaitable[T], receive: Receive) -> T | None:
    """Return what the work gives, or None once the client has gone, with the work cancelled."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
