"""core/engine/http/streaming.py: streams that end by themselves, by the client's leaving, or by its silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from core.engine.http.streaming import EventStream, unless_gone


class Client:
    """One end of a connection: takes `room` messages and then reads no further; leaves once it has `leaves_at`."""

    def __init__(self, room: int = 100, leaves_at: int = 100) -> None:
        self.got: list[Any] = []
        self._room, self._leaves_at = room, leaves_at
        self._left = asyncio.Event()

    async def send(self, message: Any) -> None:
        if len(self.got) >= self._room:
            await asyncio.Event().wait()
        self.got.append(message)
        if len(self.got) >= self._leaves_at:
            self._left.set()

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}


async def events(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield f"data: {number}\n\n".encode()
        await asyncio.sleep(0)


async def stream(client: Client, count: int) -> int:
    """Stream so many events to a client and return how often the stream was closed."""
    closed: list[None] = []
    response = EventStream(events(count), lambda: closed.append(None), timeout_s=0.05)
    await response({}, client.receive, client.send)
    return len(closed)


def test_all_events_are_sent_and_then_the_end() -> None:
    async def run() -> None:
        client = Client()
        assert await stream(client, 3) == 1
        assert [message.get("body") for message in client.got[1:-1]] == [f"data: {i}\n\n".encode() for i in range(3)]
        assert client.got[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(run())


@pytest.mark.parametrize("client", [{"leaves_at": 4}, {"room": 4}], ids=["leaves", "reads no further"])
def test_a_client_that_leaves_or_reads_no_further_closes_the_stream(client: dict[str, int]) -> None:
    async def run() -> None:
        end = Client(**client)
        assert await stream(end, 10**6) == 1
        assert 4 <= len(end.got) < 10 and end.got[-1]["more_body"]

    asyncio.run(run())


def test_nothing_is_sent_before_the_first_event() -> None:
    async def none() -> AsyncIterator[bytes]:
        yield b""
        raise RuntimeError("a fault")

    async def run() -> None:
        client = Client()
        with pytest.raises(RuntimeError, match="a fault"):
            await EventStream(none(), lambda: None, timeout_s=1)({}, client.receive, client.send)
        assert client.got == []
        assert await stream(client, 0) == 1
        assert [each["type"] for each in client.got] == ["http.response.start", "http.response.body"]

    asyncio.run(run())


def test_a_fault_of_the_events_closes_the_stream_and_is_not_lost() -> None:
    async def faulty() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise RuntimeError("a fault")

    async def run() -> None:
        closed: list[None] = []
        client = Client()
        with pytest.raises(RuntimeError, match="a fault"):
            await EventStream(faulty(), lambda: closed.append(None), timeout_s=1)({}, client.receive, client.send)
        assert len(closed) == 1 and len(client.got) == 2

    asyncio.run(run())


def test_work_goes_on_unless_the_client_has_gone() -> None:
    async def work(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def run() -> None:
        stays, leaves = Client(), Client(leaves_at=0)
        await leaves.send(None)
        assert await unless_gone(work(0), stays.receive) == "done"
        assert await unless_gone(work(60), leaves.receive) is None

    asyncio.run(run())
