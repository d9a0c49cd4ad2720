"""Running one script in several processes of a job, as torchrun does it, with a deadline for all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]


def launch(module: str, *arguments: str, size: int = 2, timeout_s: float = 240.0) -> list[Any]:
    """Run `python -m module` in each of `size` processes; return what each printed as JSON, in the order of ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        texts = [Path(folder) / str(rank) for rank in range(size)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank, text in enumerate(texts):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
                environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
                environment |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}
                environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
                command = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]
                # A pipe that nobody reads would fill up.
                with text.open("wb") as output:
                    running.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=output))
            _wait(running, time.monotonic() + timeout_s, texts)
        finally:
            for each in running:
                each.kill()
                each.wait()
        printed = [[line for line in text.read_text().splitlines() if line.startswith("{")] for text in texts]
        return [json.loads(lines[-1]) for lines in printed]


def _wait(running: list[subprocess.Popen[bytes]], deadline: float, texts: list[Path]) -> None:
    """Wait for all, or for the first to fail: its peers would wait for it."""
    while any(each.poll() is None for each in running) and not any(each.poll() for each in running):
        if time.monotonic() > deadline:
            for each in running:
                each.send_signal(signal.SIGABRT)  # says where it stands
                each.wait(10)
            raise AssertionError("\n\n".join(("the processes took too long", *map(Path.read_text, texts))))
        time.sleep(0.05)
    failed = next((text for each, text in zip(running, texts, strict=True) if each.poll()), None)
    assert failed is None, failed.read_text()[-4000:]


@contextmanager
def pretended(size: int = 2, rank: int = 0) -> Iterator[str]:
    """Make this process believe that it is a member of a group, and yield its name; collectives compute nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        group: Any = distributed.group.WORLD
        yield str(group.group_name)
    finally:
        distributed.destroy_process_group()


def counts(reports: Mapping[str, Any] | Any) -> dict[str, int]:
    """Return the matches of the passes that matched, by name."""
    return {report.name: report.matched for report in reports if report.matched}


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
