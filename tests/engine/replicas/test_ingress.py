"""core/engine/replicas/ingress.py: which requests get another replica, by a handle that stands in for Ray's."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import pytest
from fastapi import Request

from core.engine.replicas import ingress
from core.engine.replicas.messages import Asked, Head, ReplicaLostError

HEAD = Head(200, (("Content-Type", "text/plain"), ("X-Own", "1")))


class ActorDied(Exception):
    """What Ray raises where an actor is gone."""


class Parts:
    """The stream of a replica's answer: values, an exception where it is lost."""

    def __init__(self, values: list[Any]) -> None:
        self._values = iter(values)
        self.cancelled = False

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> Any:
        for value in self._values:
            if isinstance(value, BaseException):
                raise value
            return value
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Ray's handle: each call gets the next answer."""

    def __init__(self, answers: list[list[Any]]) -> None:
        self._answers, self.asked, self.parts = iter(answers), [], []  # type: tuple[Any, list[Asked], list[Parts]]
        self.answer = self

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, asked: Asked) -> Parts:
        self.asked.append(asked)
        self.parts.append(Parts(next(self._answers)))
        return self.parts[-1]


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    errors, serve = ModuleType("ray.exceptions"), ModuleType("ray.serve.exceptions")
    errors.RayActorError = ActorDied  # type: ignore[attr-defined]
    serve.DeploymentUnavailableError = serve.ReplicaUnavailableError = ConnectionError  # type: ignore[attr-defined]
    for name, module in {"ray.exceptions": errors, "ray.serve.exceptions": serve}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(ingress, "_PAUSE_S", 0.0)


def request(body: bytes = b"{}", query: bytes = b"") -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/comple%74ions",
        "query_string": query,
        "headers": [(b"a", b"b")],
    }
    return Request({**scope, "server": ("h", 80), "scheme": "http"}, receive)


def answered(
    handle: Handle, read: Callable[[AsyncIterator[bytes]], Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    async def run() -> tuple[Any, Any]:
        given: dict[str, Any] = {"max_body_bytes": 100, "patience_s": 5.0, **options}
        answer: Any = await ingress.Ingress(handle, **given)(options.pop("request", None) or request())
        if not hasattr(answer, "body_iterator"):
            return answer, answer.body
        if read is not None:
            return answer, await read(answer.body_iterator)
        return answer, b"".join([part async for part in answer.body_iterator])

    return asyncio.run(run())


@pytest.mark.parametrize(
    "error", [ReplicaLostError("gone"), ActorDied(), ConnectionError()], ids=["server", "actor", "ray"]
)
@pytest.mark.parametrize("begun", [[], [HEAD]], ids=["before the head", "before the body"])
def test_a_replica_lost_before_anything_came_is_no_loss(error: Exception, begun: list[Any]) -> None:
    handle = Handle([[*begun, error], [*begun, error], [HEAD, b"one ", b"two"]])
    answer, body = answered(handle)
    assert (answer.status_code, body, len(handle.asked)) == (200, b"one two", 3)
    assert dict(answer.headers) == {"content-type": "text/plain", "x-own": "1"}
    assert len(set(handle.asked)) == 1 and handle.asked[0].target == "/v1/comple%74ions"


def test_a_replica_lost_later_breaks_the_answer_off() -> None:
    handle = Handle([[HEAD, b"one ", ReplicaLostError("gone")]])
    with pytest.raises(ReplicaLostError):
        answered(handle)
    assert len(handle.asked) == 1 and handle.parts[0].cancelled


def test_other_errors_are_not_tried_again() -> None:
    handle = Handle([[ValueError("a fault of ours")]])
    with pytest.raises(ValueError, match="of ours"):
        answered(handle)
    assert len(handle.asked) == 1 and handle.parts[0].cancelled


def test_where_no_replica_keeps_a_request_it_ends_with_503() -> None:
    handle = Handle([[ReplicaLostError("gone")]] * 100)
    answer, body = answered(handle, patience_s=0.0)
    assert answer.status_code == 503 and b"no_replica" in body and answer.headers["retry-after"] == "1"


def test_a_client_that_goes_away_ends_the_request_on_the_replica() -> None:
    handle = Handle([[HEAD, b"one ", b"two", b"three"]])

    async def first(parts: Any) -> bytes:
        found: bytes = await anext(parts)
        await parts.aclose()
        return found

    _, body = answered(handle, first)
    assert body == b"one " and handle.parts[0].cancelled


def test_no_more_of_a_body_is_held_than_shows_that_it_is_too_large() -> None:
    handle = Handle([[HEAD, b""]])
    asyncio.run(ingress.Ingress(handle, 100, 1.0)(request(b"x" * 5000, b"q=%20")))
    assert len(handle.asked[0].body) == 101 and handle.asked[0].target == "/v1/comple%74ions?q=%20"
