"""The middleware before every endpoint: checks the key and the body's size and time, and writes the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.engine.http.config import ServerConfig
from core.engine.http.errors import ApiError
from core.engine.http.metrics import Metrics

log = logging.getLogger("core.serve")
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths without a key, for whatever restarts the process or sends it requests."""
REQUEST_ID = b"x-request-id"
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
"""An id that is taken over: it comes into logs and answers."""
_DISCARDED = 8
"""How many times the limit is read and thrown away, so that a client that is still sending can read the refusal."""


class Gate:
    """An ASGI middleware; it reads the body whole, so that an endpoint has it at once or never sees the request."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app, self._config, self._metrics = app, config, metrics
        self._key = None if config.api_key is None else _digest(config.api_key.encode())
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the request through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, _request_id(scope))
        scope["core.request_id"] = answer.request_id
        self._num_open += 1
        try:
            try:
                body = await self._admit(scope, receive)
            except ApiError as error:
                await error.response()(scope, receive, answer.send)
                return
            if body is not None:
                await self._app(scope, _replayed(body, receive), answer.send)
        finally:
            self._num_open -= 1
            self._note(scope, answer)

    async def _admit(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, None if the client has gone; raise `ApiError` for a wrong key or a refused body."""
        if self._num_open > self._config.max_open:
            raise ApiError(429, f"{self._config.max_open} requests are open already", code="too_many", retry_after_s=1)
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(_digest(given.strip()), self._key):
                message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
                raise ApiError(401, message, code="invalid_api_key")
        try:
            async with asyncio.timeout(self._config.client_timeout_s):
                return await self._read(headers.get(b"content-length", b""), receive)
        except TimeoutError:
            message = f"the body took longer than {self._config.client_timeout_s:g} s"
            raise ApiError(408, message, code="body_timeout") from None

    async def _read(self, stated: bytes, receive: Receive) -> bytes | None:
        most = self._config.max_body_bytes
        pieces: list[bytes] = []
        size = 0
        too_large = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
        if stated.isdigit() and int(stated) > _DISCARDED * most:
            raise too_large
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size <= most:
                pieces.append(message.get("body", b""))
            if size > _DISCARDED * most or (size > most and not message.get("more_body", False)):
                raise too_large
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _note(self, scope: Scope, answer: _Answer) -> None:
        route = scope.get("route")
        path = route.path if isinstance(route, APIRoute) else "other"  # unknown paths would make endless labels
        status = answer.status or 499  # the client left before an answer began
        self._metrics.answers.labels(path, str(status)).inc()
        fields = {
            "request_id": answer.request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "duration_ms": round(1000 * (time.perf_counter() - answer.began_s), 2),
            "client": (scope.get("client") or ("unknown",))[0],
        }
        quiet = scope["path"] in OPEN_PATHS or scope["path"] == "/metrics"
        log.log(logging.DEBUG if quiet else logging.INFO, "http", extra={"fields": fields})


class _Answer:
    """Sends an answer with the request's id, and remembers its status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None
        self.began_s = time.perf_counter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (REQUEST_ID, self.request_id.encode())]
        await self._send(message)


def _request_id(scope: Scope) -> str:
    """Return the id that the client, or a proxy before this server, gave the request; else a new one."""
    given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
    return given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex


def _replayed(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Return a `receive` that first yields the body that was read, then passes on the client's disconnect."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _digest(key: bytes) -> Any:
    # Compare digests of equal length, so that the time of a comparison reveals nothing about the key.
    return hashlib.sha256(key).digest()
