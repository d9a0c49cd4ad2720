"""Serve an engine until the process is told to stop, and then finish what runs."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn

from core.engine.http.app import Service, create_app
from core.engine.http.config import ServerConfig
from core.engine.serve.engine import Engine
from core.errors import UsageError

log = logging.getLogger("core.serve")


class Server(uvicorn.Server):
    """uvicorn; on a first SIGTERM or SIGINT it finishes what runs and refuses new requests, on a second it stops."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.service = Service(engine, config)
        super().__init__(
            uvicorn.Config(
                create_app(self.service),
                host=config.host,
                port=config.port,
                access_log=False,
                log_config=None,
                lifespan="on",
                timeout_graceful_shutdown=5,
            )
        )
        self._drain_timeout_s = config.drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `drain` or a signal."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where and by what."""
        await super().startup(sockets)
        config, engine = self.service.config, self.service.engine.engine
        about = {"model": config.model_name, "key": config.api_key is not None}
        about |= {"device": engine.device.name, "modes": engine.report().modes}
        for listener in sockets or () if self.started else ():
            host, port = listener.getsockname()[:2]
            log.info("serving", extra={"fields": {"url": f"http://{host}:{port}", **about}})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; asked again, stop at once."""
        if self._loop is None or self.service.admission.draining:
            self.should_exit = self.force_exit = True
        else:
            log.info("draining", extra={"fields": {"signal": signal.Signals(sig).name}})
            self.service.admission.draining = True
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Refuse new requests from now on, wait for those that run, no longer than configured, and then stop."""
        self.service.admission.draining = True
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        admission = self.service.admission
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await admission.idle.wait()
        except TimeoutError:
            log.warning("drain timed out", extra={"fields": {"sequences": admission.active}})
            await self.service.engine.close()  # each answer that is open ends with an error
        self.should_exit = True


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket that has the configured address and listens later; `UsageError` where it can't have it."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        raise UsageError(
            f"listen on {config.host}:{config.port}",
            found=error.strerror or str(error),
            remedy="name another --host or --port; port 0 takes a free one",
        ) from None
    bound.setblocking(False)
    return bound


def serve(engine: Engine, config: ServerConfig, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; return once all is finished and closed."""
    if config.api_key is None and listener.getsockname()[0] not in ("127.0.0.1", "::1"):
        log.warning("anybody who reaches this address can use the model; set CORE_API_KEY")
    Server(engine, config).run(sockets=[listener])
