"""The order of replays and updates, where nothing runs before somebody waits for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from core.common.graphs.backend import GraphKey
from core.host.selection import select_device
from core_npu.conformance import PROFILE
from core_npu.runner import NPUGraphBackend

npu, key = select_device("npu"), GraphKey("decode", (3,))
example = PROFILE.host_argument_example(npu.torch_device)
backend, inputs = NPUGraphBackend(npu.torch_device), dict(example.inputs)
lists = [step["seq_lens"] for step in example.steps]

def on_device(values):
    return torch.tensor(values, dtype=torch.int32).to(npu.torch_device)

wanted = [example.function(**{{**inputs, "seq_lens": on_device(values)}}).cpu() for values in lists]
with torch.no_grad(), backend.capture_session():
    backend.capture_one(key, lambda: (example.function(**inputs),), inputs, lambda: None)
{change}
results = []
for values in lists:
    backend.update(key, {{"seq_lens": values}})
    results.append(backend.replay(key)[0].clone())
backend._update_stream.synchronize()  # of two streams that nobody ordered, any may be the first
npu.synchronize()
print("right", [torch.equal(one.cpu(), other) for one, other in zip(results, wanted, strict=True)])
"""


def run(change: str) -> str:
    from simulator import launch

    command = [sys.executable, launch.__file__, "--schedule", "lazy", "--", sys.executable, "-W", "ignore", "-c"]
    done = subprocess.run(
        [*command, PROGRAM.format(change=change)], capture_output=True, text=True, env=os.environ, timeout=300
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_an_update_does_not_reach_the_replay_before_it() -> None:
    assert "right [True, True, True]" in run("")


@pytest.mark.slow
def test_without_the_wait_it_would() -> None:
    forget = "done = type('Done', (), {'record': lambda self: None, 'synchronize': lambda self: None})()"
    said = run(f"{forget}; backend._renewed[key].done = done")
    assert "right [False" in said or "deadlock" in said.lower() or "nobody writes the value" in said, said[-3000:]
