"""Every kernel compiles for compute capability 9.0 on any machine, and fits what a multiprocessor has.

What the interpreter runs is Python; this is what finds the rest: types, layouts, registers, shared memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = Path(__file__).parent / "support"
SHARED = 227 * 1024
"""Bytes of a block at most, at capability 9.0."""
SPILLS = 64
"""Bytes of stack per thread that are let pass: some registers of code that runs once."""
KNOWN = {"mqa drafts 512"}
"""Calls whose kernel spills more: heads of 512 with 64 rows are served, not fast."""
CALLS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "rows": ("1", "sample", "argmax"),
    "attention": (),
    "prefill": ("8b", "1b", "gemma"),
    "moe": ("qwen3", "route"),
    "rotary": ("8b", "1b", "qwen"),
}
"""By family the words that a call's name must hold one of; none takes all."""


def compiled(family: str) -> list[dict[str, Any]]:
    """Return what each kernel of a family takes, compiled in a process without the interpreter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "plugins/cuda"), str(ROOT)])}
    environment.pop("TRITON_INTERPRET", None)
    command = [
        sys.executable,
        "tools/cuda/compile_cuda_kernels.py",
        str(SUPPORT / f"calls_{family}.py"),
        *CALLS[family],
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.interpreter
@pytest.mark.parametrize("family", CALLS)
def test_kernels_compile_and_fit(family: str) -> None:
    found = compiled(family)
    assert len(found) >= 6
    for kernel in found:
        assert kernel["shared"] <= SHARED, kernel
        assert kernel["stack"] <= SPILLS or kernel["call"] in KNOWN, kernel
