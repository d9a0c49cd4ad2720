"""An engine in a thread of its own, for asyncio: requests are added and ended while it steps, and the event loop never
blocks."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from core.compilation.weights import NamedTensors
from core.engine.config import SamplingParams
from core.engine.lora.adapters import Adapter
from core.engine.serve.engine import Engine
from core.engine.serve.prompts import Prompt
from core.engine.serve.request import RequestOutput
from core.engine.serve.tickets import Receive, Ticket, deliver
from core.errors import CoreError, EngineError, UsageError

log = logging.getLogger("core.engine")
T = TypeVar("T")


class AsyncEngine:
    """Steps an engine in a thread of its own as long as there are requests; use as an async context manager.

    The engine belongs to that thread until `close`: nobody else calls it meanwhile (`call` runs a function there). All
    methods are called on the event loop on which it was started.

    A request that can't be served fails alone. A failed step is retried once if the cache allows it. If the step fails
    again, all requests of the engine end with an `EngineError`. The engine then generates one token as a test. If the
    test fails, the thread ends: `failure` says why, and every later request fails at once.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        #: Why the thread has ended; None while it serves.
        self.failure: EngineError | None = None
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Callable[[Exception], None]]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._stopping = False
        self._failed_before = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="core-engine", daemon=True)

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to serve, with outputs for the running event loop; `UsageError` the second time."""
        if self._loop is not None:
            raise UsageError("start an AsyncEngine", found="it was started before", remedy="make another one")
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End all requests, each with its completion, and the thread; the engine itself stays open."""

        def stop() -> None:
            self._stopping = True

        if self._thread.is_alive():
            self._put(stop, lambda _: None)
            await asyncio.to_thread(self._thread.join)
            await asyncio.sleep(0)  # delivers the thread's last messages

    def submit(
        self, prompt: Prompt, params: SamplingParams | None, receive: Receive, lora: str | None = None
    ) -> Ticket:
        """Queue a request: `receive` gets its outputs or its error. Raises `EngineError` once the thread has ended."""
        self._check()
        ticket = Ticket(self._abort, receive)
        self._put(lambda: self._add(ticket, prompt, params, lora), lambda error: self._post([(ticket, error)]))
        return ticket

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield what each step gives the prompt; the last output has the completion. Leaving early ends the request.

        lora: the name of a loaded adapter. Raises what `Engine.add_request` raises for a prompt that the model can't
        take or an adapter that is not loaded, and `EngineError` where the engine fails.
        """
        outputs: deque[RequestOutput | Exception] = deque()
        ready = asyncio.Event()

        def receive(output: RequestOutput | Exception) -> None:
            outputs.append(output)
            ready.set()

        ticket = self.submit(prompt, params, receive, lora)
        try:
            while not (ticket.ended and not outputs):
                await ready.wait()
                ready.clear()
                while outputs:
                    output = outputs.popleft()
                    if isinstance(output, Exception):
                        raise output
                    yield output
        finally:
            ticket.abort()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Call a function with the engine between steps; return its result. `EngineError` once the thread has ended.

        A request that the function steps or aborts ends with an `EngineError`. To add one in it is a `UsageError`.
        """
        self._check()
        assert self._loop is not None
        loop, future = self._loop, self._loop.create_future()

        def give(result: T | None, error: BaseException | None) -> None:
            if not future.done():  # the caller may have stopped waiting
                future.set_result(result) if error is None else future.set_exception(error)

        def refuse(error: BaseException) -> None:
            if isinstance(error, StopIteration):  # a future accepts no StopIteration
                raised, error = error, RuntimeError("the function raised StopIteration")
                error.__cause__ = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(give, None, error)

        def ask() -> None:
            try:
                result = function(self.engine)
                self._check_requests()
            except BaseException as error:  # any exception of the function goes to its caller
                refuse(error)
            else:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(give, result, None)

        self._put(ask, refuse)
        result: T = await future
        return result

    async def sleep(self, level: int = 1) -> int:
        """Give memory back as `Engine.sleep` does; refused while requests are unfinished. Later ones are refused."""
        return await self.call(lambda engine: engine.sleep(level))

    async def wake(self) -> None:
        """Take the memory again as `Engine.wake` does."""
        await self.call(lambda engine: engine.wake())

    async def load_weights(self, weights: NamedTensors, *, partial: bool = False) -> None:
        """Load weights as `Engine.load_weights` does; an iterator runs in the engine's thread."""
        await self.call(lambda engine: engine.load_weights(weights, partial=partial))

    async def load_lora(self, name: str, path: str | Path) -> Adapter:
        """Load an adapter as `Engine.load_lora` does, between steps."""
        return await self.call(lambda engine: engine.load_lora(name, path))

    async def unload_lora(self, name: str) -> None:
        """Remove an adapter as `Engine.unload_lora` does, between steps."""
        await self.call(lambda engine: engine.unload_lora(name))

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._loop is None or self._stopping or not self._thread.is_alive():
            found = "it was not started" if self._loop is None else "it is closed"
            raise UsageError("a request of an AsyncEngine", found=found, remedy="use it as an async context manager")

    def _abort(self, ticket: Ticket) -> None:
        self._put(lambda: self._end(ticket), lambda _: None)

    def _put(self, command: Callable[[], None], refuse: Callable[[Exception], None]) -> None:
        self._inbox.put((command, refuse))
        if self.failure is not None:  # the thread has ended, perhaps without seeing this command
            self._refuse_all(self.failure)

    def _refuse_all(self, failure: EngineError) -> None:
        """Refuse the commands that nobody will carry out. May run in any thread."""
        with suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()[1](failure)

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        failure = EngineError("a request", found="the engine was closed", remedy="start another one")
        try:
            while not self._stopping:
                self._run_commands()
                if not self._stopping and self.engine.has_unfinished:
                    self._step()
            for ticket in tuple(self._tickets.values()):
                self._end(ticket)
        except BaseException as error:
            log.exception("the engine's thread ends")
            failure = _thread_failure(error)
        finally:
            self.failure = failure
            self._post([(ticket, failure) for ticket in self._tickets.values()])
            self._tickets.clear()
            self._refuse_all(failure)

    def _run_commands(self) -> None:
        """Carry out all commands; wait for one where no request is unfinished."""
        wait = not self.engine.has_unfinished
        with suppress(queue.Empty):
            while not self._stopping:
                self._inbox.get(block=wait)[0]()
                wait = False

    def _add(self, ticket: Ticket, prompt: Prompt, params: SamplingParams | None, lora: str | None) -> None:
        try:
            ticket.request_id = self.engine.add_request(prompt, params, lora=lora)
        except Exception as error:
            self._post([(ticket, error)])
        else:
            self._tickets[ticket.request_id] = ticket

    def _end(self, ticket: Ticket) -> None:
        if ticket.request_id is None or self._tickets.pop(ticket.request_id, None) is None:
            return
        completion = self.engine.abort(ticket.request_id)
        self._post(
            [(ticket, RequestOutput(request_id=ticket.request_id, token_ids=(), text="", completion=completion))]
        )

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            self._handle_failed_step(error)
            return
        self._failed_before = False
        batch: list[tuple[Ticket, RequestOutput | Exception]] = []
        for output in outputs:
            ticket = self._tickets[output.request_id]
            if output.completion is not None:
                del self._tickets[output.request_id]
            ticket.num_tokens += len(output.token_ids)
            batch.append((ticket, output))
        self._post(batch)

    def _handle_failed_step(self, error: Exception) -> None:
        """Let the engine retry the step; at a second failure, end all requests and generate a token as a test."""
        log.error("a step failed", exc_info=error)
        if self.engine.route != "static" and not self._failed_before and not self._lost_tokens():
            self._failed_before = True
            return
        self._failed_before = False
        said = EngineError(
            "a step of the engine", found=f"{type(error).__name__}: {error}", remedy="send the request again"
        )
        self._post([(ticket, said) for ticket in self._tickets.values()])
        for request_id in tuple(self._tickets):
            self.engine.abort(request_id)
        self._tickets.clear()
        self.engine.generate([[0]], SamplingParams(max_new_tokens=1))

    def _check_requests(self) -> None:
        """End the requests that a function has stepped or aborted, and refuse those that it has added."""
        found = "a function given to `call` has stepped or ended it"
        said = EngineError("a request", found=found, remedy="send the request again")
        touched = self._lost_tokens()
        self._post([(ticket, said) for ticket in touched])
        self._tickets = {index: ticket for index, ticket in self._tickets.items() if ticket not in touched}
        added = self.engine._requests.keys() - self._tickets.keys() - {ticket.request_id for ticket in touched}
        for index in self.engine._requests.keys() - self._tickets.keys():
            self.engine.abort(index)
        if added:
            found = f"the function has added {len(added)} requests, whose outputs nobody would get"
            raise UsageError("AsyncEngine.call", found=found, remedy="use `generate` or `submit` of the AsyncEngine")

    def _lost_tokens(self) -> list[Ticket]:
        """Return the requests that the engine no longer has, or whose tokens differ from those handed out, and from
        those that its next step hands out."""
        made = {index: len(each.sequence.generated) for index, each in self.engine._requests.items()}
        told = {index: ticket.num_tokens for index, ticket in self._tickets.items()}
        for index, count in self.engine._steps.untold.items():
            told[index] = told.get(index, 0) + count
            made.setdefault(index, told[index])  # it ended, which the next step tells
        return [ticket for index, ticket in self._tickets.items() if made.get(index) != told[index]]

    def _post(self, batch: list[tuple[Ticket, RequestOutput | Exception]]) -> None:
        """Hand outputs to the event loop, those of a step in one call."""
        assert self._loop is not None
        if batch:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(deliver, batch)


def _thread_failure(error: BaseException) -> EngineError:
    found = f"the engine's thread has ended: {error.found if isinstance(error, CoreError) else error!r}"
    return EngineError("a request", found=found, remedy="start the process again; its log has the reason")
