"""One replica: an actor of Ray that has a server beside it, and hands requests to it."""

from __future__ import annotations

import http
import os
from collections.abc import AsyncIterator, Iterable, Set

import aiohttp

from core.engine.replicas.messages import Asked, Head, ReplicaLostError, ServerCommand
from core.engine.replicas.process import ServerProcess

_CONNECT_S, _HEALTH_S = 5.0, 20.0
_OWN = frozenset({"connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding"})
"""Headers of one connection, or of one server: the next has its own."""
_RAYS = frozenset({"x-request-id"})
"""Headers of an answer that Ray adds: its proxy chose the id, or took the client's, and told it to the server."""


class Replica:
    """Starts the server; answers requests by it; is healthy while the server is, and ends with it."""

    def __init__(self, command: ServerCommand) -> None:
        """Return once the server serves."""
        self._drain_timeout_s = command.drain_timeout_s
        # Ray sees at once that an actor has ended, and a failed check of its health only after some.
        self._server = ServerProcess(command.arguments, command.environment, command.folder, lambda: os._exit(1))
        self._url = self._server.url()
        self._client: aiohttp.ClientSession | None = None

    async def answer(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """Yield the head of the server's answer, then its body as it comes; closing the iterator ends the request.

        Raises `ReplicaLostError` where the server goes.
        """
        headers = _passed(asked.headers)
        sent = self._session().request(asked.method, self._url + asked.target, headers=headers, data=asked.body)
        try:
            async with sent as answer:
                yield Head(answer.status, tuple(_passed(answer.headers.items(), _RAYS)))
                async for part in answer.content.iter_any():
                    yield part
        except aiohttp.ClientError as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}") from error

    async def check_health(self) -> None:
        """Raise an error where the server is gone or asks for a restart: Ray then starts another replica."""
        limit = aiohttp.ClientTimeout(total=_HEALTH_S)
        async with self._session().get(f"{self._url}/health", timeout=limit) as answer:
            if answer.status != http.HTTPStatus.OK:
                raise ReplicaLostError(await answer.text())

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:  # made where its event loop runs
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
            )
        return self._client

    async def __del__(self) -> None:
        """Ray awaits this before it ends a replica that it has drained."""
        if self._client is not None:
            await self._client.close()
        self._server.stop(self._drain_timeout_s)


def _passed(headers: Iterable[tuple[str, str]], not_too: Set[str] = frozenset()) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _OWN | not_too]
