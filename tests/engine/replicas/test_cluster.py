"""`core serve --ray` on a real cluster of two nodes, all of them of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import IncompleteRead, RemoteDisconnected
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra `ray` (make test-ray)")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

NODES = """
import signal
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
print(cluster.address, flush=True)
signal.sigwait({signal.SIGTERM})
cluster.shutdown()
"""
SERVE = ("serve", "--device", "cpu", "--mode", "off", "--ray", "--replicas", "2")
PROMPTS = [f"The number {index} is" for index in range(24)]
SERVER = "core.cli.child [0-9]+ serve"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", NODES]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **options) as nodes:
        assert nodes.stdout is not None
        yield nodes.stdout.readline().strip()
        nodes.terminate()


@pytest.fixture
def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Service:
    """A `core serve --ray` that runs."""

    def __init__(self, address: str, port: int, *more: str) -> None:
        where = ["--ray-address", address] if address else []
        line = [sys.executable, "-m", "core", *SERVE, *where, "--port", str(port), *more]
        self.url, self.log = f"http://127.0.0.1:{port}", ""
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._serving = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._serving.wait(180), self.log[-3000:]

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.log += line
                if f'"url": "{self.url}"' in line:
                    self._serving.set()

    def complete(self, prompt: str, *, stream: bool = False) -> tuple[str, bool]:
        """Return the text of an answer, and whether it is whole."""
        asked = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "stream": stream, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(asked).encode(), headers)
        got = b""
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                while part := answer.read1():
                    got += part
        except (IncompleteRead, RemoteDisconnected, ConnectionError):
            return got.decode(), False
        if not stream:
            return str(json.loads(got)["choices"][0]["text"]), True
        parts = re.findall(r"^data: ({.*})$", got.decode(), re.MULTILINE)
        return "".join(json.loads(part)["choices"][0]["text"] for part in parts), b"[DONE]" in got

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def processes(pattern: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


@pytest.mark.parametrize("lost", ["actor", "server"])
def test_a_replica_that_is_killed_loses_nothing_that_had_sent_nothing(lost: str, address: str, port: int) -> None:
    service = Service(address, port)
    try:
        whole = {prompt: service.complete(prompt) for prompt in PROMPTS}
        assert all(complete for _, complete in whole.values())
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            asked = [pool.submit(service.complete, prompt, stream=i % 2 == 0) for i, prompt in enumerate(PROMPTS)]
            time.sleep(1.0)
            os.kill(processes("ServeReplica:.*:replica" if lost == "actor" else SERVER)[0], signal.SIGKILL)
            found = [future.result() for future in asked]
        for index, (prompt, (text, complete)) in enumerate(zip(PROMPTS, found, strict=True)):
            assert complete or (index % 2 == 0 and text), f"{prompt!r} was lost"
            assert not complete or text == whole[prompt][0]
        assert service.complete(PROMPTS[0]) == whole[PROMPTS[0]]
    finally:
        code = service.end()
    assert code == 0 and not processes(SERVER)


def test_a_model_of_two_processes_is_one_replica(address: str, port: int) -> None:
    service = Service(address, port, "--tp", "2")
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(complete for _, complete in pool.map(service.complete, PROMPTS[:8]))
    finally:
        assert service.end() == 0


def test_a_request_has_one_id(address: str, port: int) -> None:
    service = Service(address, port)
    try:
        for given in ({}, {"X-Request-Id": "job-7"}):
            headers = {"Content-Type": "application/json", **given}
            asked = json.dumps({"prompt": PROMPTS[0], "max_tokens": 1}).encode()
            request = urllib.request.Request(f"{service.url}/v1/completions", asked, headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                (told,) = answer.headers.get_all("x-request-id")
                assert json.load(answer)["id"] == f"cmpl-{told}" and told == given.get("X-Request-Id", told)
    finally:
        assert service.end() == 0


def test_a_cluster_of_its_own_ends_at_once_where_nothing_runs(port: int) -> None:
    service = Service("", port)
    assert service.complete(PROMPTS[0])[1]
    start = time.monotonic()
    assert service.end() == 0 and time.monotonic() - start < 30.0  # less than --drain-timeout
    assert not processes(SERVER)


@pytest.mark.parametrize(
    ("more", "found"),
    [(["--replica-resource", "GPU=3"], "replicas take 6 GPU"), (["--ray-address", "127.0.0.1:1"], "refused")],
    ids=["no room", "no cluster"],
)
def test_what_a_cluster_cannot_do_is_refused(more: list[str], found: str, address: str) -> None:
    line = [sys.executable, "-m", "core", *SERVE, "--ray-address", address, *more]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and found in done.stderr
