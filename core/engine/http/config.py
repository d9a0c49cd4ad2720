"""How the server listens and what it refuses; parsed once, torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Where the server listens, who may ask, and how much."""

    #: The name by which clients ask for the model.
    model_name: str
    #: Names and folders of the adapters to load.
    loras: tuple[tuple[str, Path], ...] = ()
    host: str = "127.0.0.1"
    #: 0 takes a free one.
    port: int = 8000
    #: What clients send as `Authorization: Bearer …`; None lets everybody in.
    api_key: str | None = field(default=None, repr=False)
    #: Sequences that may wait for a place in the engine; beyond, requests are refused with 429.
    max_queue: int = 256
    max_body_bytes: int = 4 * 2**20
    #: Requests open at once, including those whose body is still being read.
    max_open: int = 4096
    #: Longest time a client may take to send its body, or to take a piece of its answer.
    client_timeout_s: float = 60.0
    #: How long running requests may go on after SIGTERM.
    drain_timeout_s: float = 30.0
