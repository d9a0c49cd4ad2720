"""A server in a thread of the test's process, on a free port, and an engine whose steps a test may hold up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs the extra 'dev'")
pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
pytest.importorskip("prometheus_client", reason="needs the extra 'serve'")

import httpx
import openai

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.http.config import ServerConfig
from core.engine.http.server import Server, bind
from core.engine.models.assets import embedded_model
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig

TEXTS = ["If the argument is", "Return a list of the names", "This", "The Python interpreter is a program that reads"]
CONFIG = EngineConfig(max_num_seqs=4, max_model_len=160, options=CompileOptions(mode="off"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Served:
    """A running server."""

    def __init__(self, server: Server, url: str, key: str) -> None:
        self.server, self.url = server, url
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"})

    def metric(self, name: str) -> float:
        """Return one sample of /metrics, named with its labels; 0 where there is none yet."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send a body as it is."""
        return self.http.post(path, json=body)

    def drain(self) -> None:
        """Do what SIGTERM does."""
        assert self.server._loop is not None
        self.server._loop.call_soon_threadsafe(self.server.drain)


@contextmanager
def serving(engine: Engine, **fields: Any) -> Iterator[Served]:
    """Serve an engine until the block ends; the engine stays open."""
    config = ServerConfig(**{"model_name": "tiny", "port": 0, "drain_timeout_s": 20.0, **fields})
    listener = bind(config)
    server = Server(engine, config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    wait_for(lambda: server.started)
    served = Served(server, f"http://127.0.0.1:{listener.getsockname()[1]}", config.api_key or "none")
    try:
        yield served
    finally:
        served.openai.close()
        served.http.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


class Brake:
    """Holds the steps of an engine up, one by one or until they are let go."""

    def __init__(self, engine: Engine) -> None:
        self._step, self.engine = engine.step, engine
        self._free = threading.Event()
        self._free.set()
        self.before: Callable[[], None] = lambda: None
        engine.step = self._held  # type: ignore[method-assign]

    def hold(self) -> None:
        """Let no further step begin."""
        self._free.clear()

    def release(self) -> None:
        """Let steps go on."""
        self._free.set()

    def remove(self) -> None:
        """Give the engine its own step back."""
        self.release()
        del self.engine.step  # type: ignore[method-assign]

    def _held(self) -> Any:
        assert self._free.wait(30)
        self.before()
        return self._step()


def load(config: EngineConfig = CONFIG, *, template: str | None = TEMPLATE) -> Engine:
    """Return an engine of the embedded model, whose tokenizer gets a chat template."""
    engine = Engine.load(embedded_model(), "cpu", config)
    engine.loaded.require_tokenizer().chat_template = template
    return engine


def offline(engine: Engine, text: Any, count: int, **params: Any) -> Completion:
    """Return what the engine gives without a server."""
    return engine.generate([text], SamplingParams(max_new_tokens=count, **params))[0]


def wait_for(condition: Callable[[], object], limit_s: float = 30) -> None:
    """Wait until something holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream that has ended, parsed, the last one as it is where it is no JSON."""
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]
