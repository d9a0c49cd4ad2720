"""Replicas on a cluster of Ray: started, served and ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.engine.replicas.messages import ServerCommand
from core.errors import CoreError, UsageError

log = logging.getLogger("core.serve")

_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 30.0
_CONNECT_S = 5.0
_INGRESSES = 2
"""So that one may be lost; what it has open is lost with it."""
_OPEN = 10_000
_END_S = 10.0
"""For what is left to do once requests have ended: longer than a replica waits for its server."""
_STARTS = 3
"""How often a replica may fail to start before the command gives up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to be served on a cluster."""

    command: ServerCommand
    #: The least and the most replicas; more are started while each has more requests than sequences at once.
    replicas: tuple[int, int]
    #: What each replica takes of its host, in Ray's words: CPU, GPU, and a cluster's own.
    resources: Mapping[str, float]
    #: Ray's name of the application.
    name: str
    host: str
    port: int
    #: Address of a cluster; None for that of RAY_ADDRESS, else for one of this machine alone, made and ended here.
    address: str | None
    #: Sequences that a replica generates at once.
    at_once: int
    max_body_bytes: int
    #: How long a request may look for a replica.
    patience_s: float = 300.0


def serve_replicas(plan: Plan) -> None:
    """Serve until SIGTERM or SIGINT; what runs then may finish. For the main thread.

    Raises `UsageError` where the cluster can't be reached, or has no room for the least number of replicas.
    """
    import ray
    from ray import serve

    _connect(ray, plan)
    try:
        alone = _serve(serve, plan)
        shown = {"url": _url(plan), "replicas": plan.replicas, "nodes": len(ray.nodes())}
        log.info("serving", extra={"fields": shown})
        received = _wait_for_signal()
        log.info("draining", extra={"fields": {"signal": received.name}})
        serve.delete(plan.name)
        if alone:
            serve.shutdown()  # else its listener keeps the port that this command was given
    finally:
        ray.shutdown()


def _wait_for_signal() -> signal.Signals:
    """Return the first of SIGTERM and SIGINT.

    By handlers: signals that were blocked instead would be so in every process that Ray starts here.
    """
    received: list[int] = []
    came = threading.Event()

    def note(number: int, _: object) -> None:
        received.append(number)
        came.set()

    before = {each: signal.signal(each, note) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        came.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return signal.Signals(received[0])


def _connect(ray: Any, plan: Plan) -> None:
    """Reach the cluster, and check that it has room."""
    asked = f"core serve --ray on {plan.address or 'a cluster of this machine'}"
    _check_address(asked, plan.address or os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address=plan.address, log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(asked, found=str(error), remedy="name the address of a running cluster") from error
    there = ray.cluster_resources()
    least = plan.replicas[0]
    for name, each in plan.resources.items():
        if least * each > there.get(name, 0.0):
            ray.shutdown()
            raise UsageError(
                asked,
                found=f"{least} replicas take {least * each:g} {name}, and the cluster has {there.get(name, 0.0):g}",
                remedy="ask for fewer --replicas, or for less by --replica-resource",
            )


def _serve(serve: Any, plan: Plan) -> bool:
    """Start the application; tell whether it is the only one, so that Ray Serve itself may end with it."""
    serve.start(http_options={"host": plan.host, "port": plan.port, "location": "EveryNode"})
    alone = not serve.status().applications
    try:
        serve.run(_application(serve, plan), name=plan.name, route_prefix="/", blocking=False)
    except RuntimeError as error:  # Ray's own words hold those of the replica
        remedy = "see why the same core serve fails without --ray, on a host of the cluster"
        raise CoreError("core serve --ray", found=str(error), remedy=remedy) from error
    try:
        urllib.request.urlopen(f"{_url(plan)}/-/healthz", timeout=_CONNECT_S).close()
    except OSError as error:
        serve.delete(plan.name)
        raise UsageError(
            f"core serve --ray on {_url(plan)}",
            found=f"{error}; Ray Serve ran there already, for others, and listens where they wanted",
            remedy="give its own --host and --port, or end it by `serve shutdown`",
        ) from error
    return alone


def _url(plan: Plan) -> str:
    return f"http://[{plan.host}]:{plan.port}" if ":" in plan.host else f"http://{plan.host}:{plan.port}"


def _check_address(asked: str, address: str) -> None:
    """Raise `UsageError` where nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", or a form of Ray's own
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise UsageError(asked, found=str(error), remedy="name the address of a running cluster") from None


def _application(serve: Any, plan: Plan) -> Any:
    from core.engine.replicas.ingress import Ingress
    from core.engine.replicas.replica import Replica

    own = dict(plan.resources)
    options = {"num_cpus": own.pop("CPU", 0.0), "num_gpus": own.pop("GPU", 0.0), "resources": own}
    least, most = plan.replicas
    number: dict[str, Any] = {"num_replicas": least}
    if most > least:
        number = {
            "autoscaling_config": {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": plan.at_once}
        }
    replicas = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options=options,
        max_ongoing_requests=_OPEN,  # its server refuses what is too much, as --max-queue says
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=plan.command.drain_timeout_s + _END_S,
        max_constructor_retry_count=_STARTS,
        **number,
    ).bind(plan.command)
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=_INGRESSES,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_OPEN,
        graceful_shutdown_timeout_s=plan.command.drain_timeout_s + _END_S,
    )
    return ingress.bind(replicas, plan.max_body_bytes, plan.patience_s)
