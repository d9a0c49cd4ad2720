"""What clients of several replicas talk to: it hands each request to one, and to another while nothing has come."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from core.engine.http.errors import ApiError
from core.engine.replicas.messages import Asked, Head, ReplicaLostError

log = logging.getLogger("core.serve")

_PAUSE_S = 0.2
"""Between two tries: Ray needs a moment to see that a replica is gone."""


class Ingress:
    """Ray Serve calls it for each HTTP request.

    A request goes to the replica that Ray chooses. Where that is lost before any of its answer's body has come, another
    one gets the request: the client has seen nothing of the first. Where it is lost later, the answer breaks off.
    """

    def __init__(self, replicas: Any, max_body_bytes: int, patience_s: float) -> None:
        """replicas: Ray's handle of the deployment of `Replica`.

        max_body_bytes: no more of a body is held than is needed to see that a replica will refuse it. patience_s: how
        long a request may look for a replica that keeps it.
        """
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

        self._replicas = replicas.options(stream=True)
        self._max_body_bytes, self._patience_s = max_body_bytes, patience_s
        self._lost = (ReplicaLostError, RayActorError, ReplicaUnavailableError, DeploymentUnavailableError)

    async def __call__(self, request: Request) -> Response:
        """Return the answer of a replica, or 503 where none could be found in time."""
        path = request.scope.get("raw_path") or quote(request.url.path).encode()
        target = path.decode("latin-1") + (f"?{request.url.query}" if request.url.query else "")
        asked = Asked(request.method, target, tuple(request.headers.items()), await self._body(request))
        began, tries = time.monotonic(), 0
        while True:
            parts = self._replicas.answer.remote(asked)
            try:
                head = await anext(parts)
                first = await anext(parts, b"")  # a stream has its head long before its first token
                break
            except self._lost as error:
                tries += 1
                why = f"{type(error).__name__} at try {tries}"
            except BaseException:
                parts.cancel()
                raise
            log.warning("a replica was lost before it answered: %s", why)
            if time.monotonic() - began > self._patience_s:
                return ApiError(503, f"no replica answered: {why}", code="no_replica", retry_after_s=1).response()
            await asyncio.sleep(_PAUSE_S)
        assert isinstance(head, Head)
        answer = StreamingResponse(_body(first, parts), head.status)
        answer.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in head.headers]
        return answer

    async def _body(self, request: Request) -> bytes:
        read = b""
        async for part in request.stream():
            read += part
            if len(read) > self._max_body_bytes:
                break
        return read[: self._max_body_bytes + 1]


async def _body(first: bytes, parts: Any) -> AsyncIterator[bytes]:
    """Yield what a replica sends; a client that goes away ends the request there."""
    ended = False
    try:
        yield first
        async for part in parts:
            yield part
        ended = True
    finally:
        if not ended:
            parts.cancel()
