"""Soak `core serve`: many clients at once, well-behaved and not, until the time is over; then SIGTERM.

It starts the server on the embedded model, asks it for the right answers one by one, and then has clients stream, leave
in the middle, read slowly, and send what is malformed or too large. Every stream must be whole, and equal to the answer
that its prompt and seed have alone; every refusal must have its status; the server must come back to rest, drain at
SIGTERM while streams are open, and exit with 0. It reports counts, and the server's memory before, during and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

KEY = "soak"
PROMPTS = ("If the argument is", "Return a list of the names", "This", "The Python interpreter is", "A class that")
TOKENS = (3, 17, 40)
MAX_BODY = 20_000
DEFAULT = [
    *("--device", "cpu", "--mode", "off", "--max-num-seqs", "16", "--max-queue", "40"),
    *("--cache-tokens", "480", "--max-model-len", "160"),
]
"""Options of a server whose queue and cache are too small for all clients at once."""
_HEADERS = {"Authorization": f"Bearer {KEY}"}


@dataclass(kw_only=True, slots=True)
class Soak:
    """What clients share."""

    client: httpx.AsyncClient
    rng: random.Random
    expected: dict[tuple[str, int, int | None], list[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Note what should not be."""
        self.counts["faults"] += 1
        if len(self.faults) < 20:
            self.faults.append(text)


def body(prompt: str, tokens: int, seed: int | None, *, stream: bool) -> dict[str, Any]:
    """Return a request whose answer is always the same."""
    hot = {"temperature": 0.0} if seed is None else {"temperature": 0.9, "seed": seed}
    return {
        "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream, "return_token_ids": True, **hot
    }  # fmt: skip


async def learn(soak: Soak) -> None:
    """Ask for every answer alone."""
    for prompt in PROMPTS:
        for tokens in TOKENS:
            for seed in (None, 11):
                answer = await soak.client.post("/v1/completions", json=body(prompt, tokens, seed, stream=False))
                soak.expected[prompt, tokens, seed] = answer.json()["choices"][0]["token_ids"]


async def read(soak: Soak, *, pause_s: float = 0.0, leave_after: int | None = None) -> None:
    """Stream one answer and hold it against the right one; leave_after: so many events."""
    key = soak.rng.choice(list(soak.expected))
    found: list[int] = []
    events = 0
    async with soak.client.stream("POST", "/v1/completions", json=body(*key, stream=True)) as answer:
        if answer.status_code == 429:
            soak.counts["refused: 429"] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]))
            return
        if answer.status_code != 200:
            soak.fault(f"{key}: status {answer.status_code}")
            return
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    soak.fault(f"{key}: {event}")
                    return
                found += [token for choice in event["choices"] for token in choice["token_ids"]]
                events += 1
            if leave_after is not None and events >= leave_after:
                soak.counts["injected: left in the middle"] += 1
                return
            await asyncio.sleep(pause_s)
            if line == "data: [DONE]":
                break
        else:
            soak.fault(f"{key}: the stream ended without [DONE]")
            return
    if found != soak.expected[key]:
        soak.fault(f"{key}: {found} instead of {soak.expected[key]}")
    soak.counts["streams that are right" if not pause_s else "slow streams that are right"] += 1


INJECTED: dict[str, tuple[int, dict[str, Any]]] = {
    "broken JSON": (400, {"content": b"{"}),
    "a negative number": (400, {"json": {"prompt": "This", "max_tokens": -1}}),
    "an unknown field": (400, {"json": {"prompt": "This", "no_such_field": 1}}),
    "an unknown token": (400, {"json": {"prompt": [1, 2, 10**9]}}),
    "more tokens than the context holds": (400, {"json": {"prompt": "This", "max_tokens": 10**6}}),
    "a prompt longer than the context": (400, {"json": {"prompt": [5] * (MAX_BODY // 4)}}),
    "a body too large": (413, {"json": {"prompt": "x" * (MAX_BODY + 1)}}),
    "a wrong key": (401, {"json": {"prompt": "This"}, "headers": {"Authorization": "Bearer wrong"}}),
}
"""What has to be refused, by name: the status that is due, and what is sent."""


async def misbehave(soak: Soak) -> None:
    """Send what has to be refused."""
    name = soak.rng.choice(list(INJECTED))
    status, sent = INJECTED[name]
    soak.counts[f"injected: {name}"] += 1
    answer = await soak.client.post("/v1/completions", **sent)
    # What is wrong with tokens is seen once they are let in, so that a full queue may come first.
    if answer.status_code not in ((status, 429) if status == 400 else (status,)) or "error" not in answer.json():
        soak.fault(f"{name}: {status} was due, not {answer.status_code}")
    soak.counts[f"refused: {answer.status_code}"] += 1


async def live(soak: Soak, until: float, most: int | None) -> None:
    """Be one client after another until the time is over, or so many requests are sent."""
    while time.monotonic() < until and (most is None or soak.counts["requests"] < most):
        soak.counts["requests"] += 1
        kind = soak.rng.random()
        try:
            if kind < 0.6:
                await read(soak)
            elif kind < 0.75:
                await read(soak, leave_after=soak.rng.randint(1, 5))
            elif kind < 0.85:
                await read(soak, pause_s=0.02)
            else:
                await misbehave(soak)
        except httpx.HTTPError as error:
            soak.fault(repr(error))


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def samples(soak: Soak) -> dict[str, float]:
    """Return the server's metrics."""
    text = (await soak.client.get("/metrics")).text
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def rest(soak: Soak) -> None:
    """Wait until the server has nothing to do, and hold its books against each other."""
    for _ in range(300):
        found = await samples(soak)
        busy = [found[f"core_{name}"] for name in ("sequences_running", "sequences_waiting", "cache_blocks_used")]
        if not any(busy):
            break
        await asyncio.sleep(0.1)
    else:
        soak.fault(f"at rest, {busy} sequences run, wait, and blocks are taken")
    if found["core_engine_joined_total"] != found["core_engine_ended_total"]:
        soak.fault("sequences that joined have not ended")
    if any(name.startswith('core_sequences_total{outcome="error"') for name in found):
        soak.fault("sequences ended with an error")
    soak.counts["tokens"] = int(found["core_generated_tokens_total"])
    soak.counts["preemptions"] = int(found["core_engine_preempted_total"])


async def drain(soak: Soak, process: asyncio.subprocess.Process, clients: int) -> None:
    """Send SIGTERM while streams are open: they end whole, and the process with 0."""
    before = soak.counts["streams that are right"]
    streams = [asyncio.ensure_future(read(soak)) for _ in range(clients)]
    for _ in range(600):
        found = await samples(soak)
        if found["core_sequences_running"] + found["core_sequences_waiting"] >= clients:
            break
        await asyncio.sleep(0.01)
        if all(stream.done() for stream in streams):
            break
    process.send_signal(signal.SIGTERM)
    await asyncio.gather(*streams)
    soak.counts["streams over SIGTERM"] = soak.counts["streams that are right"] - before
    if await asyncio.wait_for(process.wait(), 60):
        soak.fault(f"the server exited with {process.returncode}")


async def start(log: Path, options: Sequence[str]) -> tuple[asyncio.subprocess.Process, str]:
    """Start the server, with its log in a file, and return it with its address once it is ready."""
    command = [sys.executable, "-m", "core", "serve", "--port", "0", "--max-body-bytes", str(MAX_BODY), *options]
    with log.open("w") as written:
        environment = {**os.environ, "CORE_API_KEY": KEY}
        process = await asyncio.create_subprocess_exec(*command, stderr=written, env=environment)
    while process.returncode is None:
        events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        for each in events:
            if each["event"] == "serving":
                return process, each["url"]
        await asyncio.sleep(0.1)
    raise SystemExit(f"the server did not start: {log.read_text()}")


async def soak(minutes: float, clients: int, most: int | None, seed: int, options: Sequence[str]) -> dict[str, Any]:
    """Run it all and return the report."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process, url = await start(log, options)
        try:
            limits = httpx.Limits(max_connections=clients + 8)
            async with httpx.AsyncClient(base_url=url, headers=_HEADERS, timeout=120, limits=limits) as client:
                run = Soak(client=client, rng=random.Random(seed))
                await learn(run)
                memory = [memory_mib(process.pid)]
                until = time.monotonic() + 60 * minutes
                living = asyncio.gather(*(live(run, until, most) for _ in range(clients)))
                while not living.done():
                    await asyncio.wait([living], timeout=max(0.5, 60 * minutes / 10))
                    memory.append(memory_mib(process.pid))
                await living
                await rest(run)
                memory.append(memory_mib(process.pid))
                await drain(run, process, min(clients, 8))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        errors = [line for line in log.read_text().splitlines() if '"level": "error"' in line]
    for line in errors[:5]:
        run.fault(f"the server's log: {line[:500]}")
    counts = dict(sorted(run.counts.items()))
    return {"counts": counts, "memory_mib": [round(each, 1) for each in memory], "faults": run.faults}


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print the report as JSON, and return 0 only where nothing was other than it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long clients come")
    parser.add_argument("--clients", type=int, default=64, help="clients at once")
    parser.add_argument("--requests", type=int, help="stop after so many requests")
    parser.add_argument("--seed", type=int, default=0, help="of what clients do")
    options = f"options of core serve, after --; else {' '.join(DEFAULT)}"
    parser.add_argument("serve", nargs="*", default=[], help=options)
    chosen = parser.parse_args(arguments)
    report = asyncio.run(soak(chosen.minutes, chosen.clients, chosen.requests, chosen.seed, chosen.serve or DEFAULT))
    print(json.dumps(report, indent=2))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
