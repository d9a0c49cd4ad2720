"""What the processes of a cluster tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class ReplicaLostError(Exception):
    """The server of a replica is gone, or went in the middle of an answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as any replica may get it."""

    method: str
    #: Path and query, as the client wrote them.
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before the body of an answer."""

    status: int
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCommand:
    """What a replica starts."""

    #: Of `core serve`, `--host` and `--port` among them.
    arguments: Sequence[str]
    #: Variables beside those of the replica's process.
    environment: Mapping[str, str]
    #: Where it runs, so that relative paths mean what they meant to the user; each host must have it.
    folder: Path
    drain_timeout_s: float
