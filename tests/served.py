"""`core serve` as a process, on any device: where it listens, what it streams, and the same tokens without a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PROMPT, NUM_TOKENS = "The Python interpreter is", 20
_LIMITS = {"max_num_seqs": 2, "max_model_len": 64}
_OFFLINE = """
import json, sys
import core
from core.engine.models.assets import embedded_model

device, prompt, count, limits, lowering = sys.argv[1:]
config = core.EngineConfig(**json.loads(limits), options=core.CompileOptions(lowering=lowering))
with core.Engine.load(embedded_model(), device, config) as engine:
    (completion,) = engine.generate([prompt], core.SamplingParams(max_new_tokens=int(count), ignore_eos=True))
    print(json.dumps(completion.token_ids))
"""


def check_streams_of(
    device: str, folder: Path, environment: Mapping[str, str], *, modes: Mapping[str, str], lowering: str = "inline"
) -> None:
    """Serve the embedded model on a device and stream a completion, which must have the tokens of an engine alone.

    folder: for the server's log. environment: of both processes. modes: those that the server must say it serves by.
    lowering: inline compiles no kernels, which takes a processor minutes.
    """
    options = ["--device", device, "--lowering", lowering]
    options += [word for name, value in _LIMITS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with serve_process(options, folder / "log", environment) as (
        process,
        told,
    ):
        assert (told["device"], told["modes"]) == (device, dict(modes))
        pieces = streamed(told["url"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    limits = json.dumps(_LIMITS)
    command = [sys.executable, "-c", _OFFLINE, device, PROMPT, str(NUM_TOKENS), limits, lowering]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment), check=False)
    assert done.returncode == 0, done.stderr
    alone = json.loads(done.stdout.splitlines()[-1])
    assert len(pieces) > 3 and [token for piece in pieces for token in piece] == alone and len(alone) == NUM_TOKENS


def streamed(url: str, prompt: str = PROMPT, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Return the tokens of a greedy completion, as its events bring them."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    found: list[list[int]] = []
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        found += [choice["token_ids"] for choice in json.loads(line)["choices"] if choice.get("token_ids")]
    return found


@contextmanager
def serve_process(
    options: Sequence[str], log: Path, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """Start `core serve` on a free port and yield it with what it says when it listens; it is gone after the block."""
    command = [sys.executable, "-m", "core", "serve", "--port", "0", *options]
    with log.open("w") as written:
        process = subprocess.Popen(command, stderr=written, env={**environment, "OMP_NUM_THREADS": "1"})
    try:
        yield process, _told(process, log)
    finally:
        process.kill()
        process.wait()


def _told(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    for _ in range(1800):
        for line in log.read_text().splitlines():
            event: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "serving":
                return event
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"it did not start: {log.read_text()}")
