"""`core serve --ray`: its options, and what each replica is to run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from core.cli.ranks import COMMAND_LINE
from core.engine.parallel.rank import num_ranks
from core.errors import UsageError

if TYPE_CHECKING:
    from core.engine.http.config import ServerConfig

RAY: Any = typer.Option(
    False, "--ray", help="Serve by replicas that Ray Serve places, watches and replaces (docs/serving.md)."
)
REPLICAS: Any = typer.Option(
    "1", "--replicas", metavar="N|MIN:MAX", help="With --ray: how many, or as many as requests ask for."
)
ADDRESS: Any = typer.Option(
    None, "--ray-address", help="With --ray: of a cluster; default: RAY_ADDRESS, else one of this machine alone."
)
RESOURCE: Any = typer.Option(
    [],
    "--replica-resource",
    metavar="NAME=AMOUNT",
    help="With --ray: what a replica takes of its host, such as GPU=1; repeatable; default: CPU=1 for each process.",
)
"""Defaults of the parameters `ray`, `replicas`, `ray_address` and `replica_resource`."""

_OWN = {"--ray": 0, "--replicas": 1, "--ray-address": 1, "--replica-resource": 1, "--host": 1, "--port": 1}
"""Options that are not handed to replicas, and how many words follow each."""


def check_ray(*, ray: bool, replicas: str, address: str | None, resources: Sequence[str]) -> None:
    """Raise `UsageError` for options of --ray without it, and for --ray in a process that a launcher started."""
    given = {"--replicas": replicas != "1", "--ray-address": address is not None, "--replica-resource": bool(resources)}
    if not ray and any(given.values()):
        asked = next(name for name, there in given.items() if there)
        raise UsageError(asked, found="it says how Ray serves, and --ray is not given", remedy="add --ray")
    if ray and num_ranks() > 1:
        found = f"a launcher has started this process as one of {num_ranks()} ranks, each of which would serve replicas"
        raise UsageError("--ray", found=found, remedy="start it once, and give replicas several processes by --tp")


def serve_by_replicas(
    config: ServerConfig,
    *,
    replicas: str,
    address: str | None,
    resources: Sequence[str],
    processes: int,
    sequences: int,
) -> None:
    """Serve until a signal; processes: of each replica."""
    least, most = _range(replicas)
    if any(each.partition("=")[0] == "--api-key" for each in COMMAND_LINE.get()):
        found = "Ray shows command lines to everybody who reaches the cluster"
        raise UsageError("--api-key with --ray", found=found, remedy="set CORE_API_KEY instead")
    if config.port == 0:
        raise UsageError("--port 0 with --ray", found="Ray Serve takes a port by its number", remedy="name one")
    wanted = {"CPU": float(processes)} | _resources(resources)
    try:
        import ray  # noqa: F401  # with aiohttp, which the replicas need

        from core.engine.replicas.cluster import Plan, serve_replicas
        from core.engine.replicas.messages import ServerCommand
    except ModuleNotFoundError as error:
        from core.host.distributions.installing import pip_install

        found = f"the module {error.name!r} is not installed"
        raise UsageError("core serve --ray", found=found, remedy=pip_install("hf", "serve", "ray")) from None
    from core.engine.http.logs import log_as_json

    log_as_json()
    command = ServerCommand(
        arguments=[*own_arguments(COMMAND_LINE.get()), "--host", "127.0.0.1", "--port", "0"],
        environment={name: value for name, value in os.environ.items() if name.startswith("CORE_")},
        folder=Path.cwd(),
        drain_timeout_s=config.drain_timeout_s,
    )
    serve_replicas(
        Plan(
            command=command,
            replicas=(least, most),
            resources=wanted,
            name=config.model_name,
            host=config.host,
            port=config.port,
            address=address,
            at_once=sequences,
            max_body_bytes=config.max_body_bytes,
        )
    )


def own_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the options that are this process's own."""
    kept, skip = [], 0
    for each in arguments:
        name, equals, _ = each.partition("=")
        if skip:
            skip -= 1
        elif name in _OWN:
            skip = 0 if equals else _OWN[name]
        else:
            kept.append(each)
    return kept


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        remedy = "give a number from 1 on, or two with a colon, such as 1:4"
        raise UsageError(f"--replicas {text}", found="it is no number or range of replicas", remedy=remedy)
    return least, most


def _resources(texts: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        asked = f"--replica-resource {text}"
        if not name or not re.fullmatch(r"\d+(\.\d+)?", amount):
            remedy = "write a name of Ray's and an amount, such as GPU=1"
            raise UsageError(asked, found="it is not NAME=AMOUNT", remedy=remedy)
        if name in found:
            raise UsageError(asked, found=f"{name}={found[name]:g} is given too", remedy="give each resource once")
        found[name] = float(amount)
    return found
