"""Every kernel compiles for compute capability 9.0 on any machine, some of each family for 8.0, 8.9 and 10.0 as well,
and they fit what a multiprocessor has.

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
SHARED = {80: 163, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory of a block at most, by capability (CUDA C++ Programming Guide, "Compute Capabilities")."""
TENSOR = 512
"""Columns of tensor memory of a multiprocessor, which capability 10.0 has."""
SPILLS = {80: 128, 89: 128, 90: 64, 100: 64}
"""Bytes of stack per thread that are let pass: some registers of code that runs once; more where registers also hold
the operands of products."""
KNOWN = {("mqa drafts 512", c) for c in SHARED} | {("gemma 2", 100)}
"""Calls, by capability, whose kernel spills more: heads of 512 with 64 rows, and of 256, are served there, not fast."""
CALLS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "rows": ("1", "sample", "argmax"),
    "attention": (),
    "prefill": ("8b", "1b", "gemma"),
    "moe": ("qwen3", "route"),
    "rotary": ("8b", "1b", "qwen"),
}
"""By family the words that a call's name must hold one of; none takes all."""


OTHERS = (
    *("linear 1 x 4096", "linear 8 x 6144", "linear 64 x 28672", "codes 1 x 4096", "codes 8 x 6144"),
    *(
        "rms_norm 1x4096",
        "quantize token 1x4096",
        "quantize int8 1x4096",
        "gate_quantize group 1x8192",
        "quantize whole",
    ),
    *("sample 1", "argmax 8", "8b decode 8", "mqa decode 8", "mqa drafts 512", "8b fp32", "8b codes 8"),
    *("8b 4096 in 8", "gemma 2", "8b codes, coded", "qwen3 8", "mixtral 64", "qwen3 4096", "route qwen3"),
    *("8b rotary 64", "8b table 64", "8b qk norm 64", "8b codes, half 64"),
)
"""Words of the calls that are compiled for other capabilities, of all families."""
IN_CODES = ("codes", "token", "group")
"""Words of those that hold codes of fp8."""


def compiled(capability: int, *words: str, failing: bool = False) -> list[dict[str, Any]]:
    """Return what each kernel takes, compiled in a process without the interpreter; words: files and words of names."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "plugins/cuda"), str(ROOT)])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "tools/cuda/compile_cuda_kernels.py", "--capability", str(capability), *words]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == failing, run.stdout[-3000:] + run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def file_of(family: str) -> str:
    return str(SUPPORT / f"calls_{family}.py")


def check(capability: int, kernels: list[dict[str, Any]]) -> None:
    """Check that kernels fit a GPU."""
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability] * 1024, kernel
        assert kernel["tensor"] <= TENSOR, kernel
        assert kernel["stack"] <= SPILLS[capability] or (kernel["call"], capability) in KNOWN, kernel


@pytest.mark.interpreter
@pytest.mark.parametrize("family", CALLS)
def test_kernels_compile_and_fit(family: str) -> None:
    found = compiled(90, file_of(family), *CALLS[family])
    assert len(found) >= 6
    check(90, found)


@pytest.mark.interpreter
@pytest.mark.parametrize("capability", [80, 89, 100])
def test_kernels_compile_and_fit_other_capabilities(capability: int) -> None:
    """What does not compile at 8.0 is what conditions refuse there: all that holds codes of fp8, and nothing else."""
    found = compiled(capability, *map(file_of, CALLS), *OTHERS, failing=capability < 89)
    check(capability, [kernel for kernel in found if "error" not in kernel])
    missing = [word for word in OTHERS if not any(word in kernel["call"] for kernel in found)]
    assert not missing
    failed = {kernel["call"]: kernel["error"] for kernel in found if "error" in kernel}
    coded = {kernel["call"] for kernel in found if any(word in kernel["call"] for word in IN_CODES)}
    assert set(failed) == (coded if capability < 89 else set())
    assert all("fp8e4nv not supported" in error for error in failed.values())
