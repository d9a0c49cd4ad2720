"""Every kernel compiles for compute capability 9.0 on any machine, fits what a multiprocessor has, and waits for the
kernel that it overlaps with.

What the interpreter runs is Python; this is what finds the rest: types, layouts, registers, shared memory, and the
order that the compiler leaves instructions in.
"""

from __future__ import annotations

import ast
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
    "rows": ("1", "sample", "argmax", "whole", "layer_norm 4x65536"),
    "attention": (),
    "prefill": ("8b", "1b", "gemma"),
    "moe": ("qwen3", "route"),
    "rotary": ("8b", "1b", "qwen"),
}
"""By family the words that a call's name must hold one of; none takes all."""
KERNELS: dict[str, set[str]] = {
    "linear": {"_row_kernel", "_tile_kernel", "_scale_kernel"},
    "rows": {
        *("norm_kernel", "long_norm_kernel", "_gate_kernel", "_rows_kernel", "_parts_kernel", "_whole_scale_kernel"),
        *("_argmax_kernel", "bounds_kernel", "histogram_kernel", "choose_kernel"),
    },
    "attention": {"decode_kernel"},
    "prefill": {"prefill_kernel", "decode_kernel", "_write_kernel"},
    "moe": {"row_up_kernel", "row_down_kernel", "sort_kernel", "product_kernel", "sum_kernel", "_route_kernel"},
    "rotary": {"rotary_kernel", "_table_kernel", "prefill_kernel"},
}
"""By family the kernels that its calls launch."""


def compiled(file: str, words: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return what each kernel of a file of calls takes, compiled in a process without the interpreter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "plugins/cuda"), str(ROOT)])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "tools/cuda/compile_cuda_kernels.py", str(SUPPORT / file), *words]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.interpreter
@pytest.mark.parametrize("family", CALLS)
def test_kernels_compile_and_fit_and_wait(family: str) -> None:
    found = compiled(f"calls_{family}.py", CALLS[family])
    assert {kernel["kernel"] for kernel in found} == KERNELS[family]
    early: dict[str, set[str]] = {}
    for kernel in found:
        assert kernel["shared"] <= SHARED, kernel
        assert kernel["stack"] <= SPILLS or kernel["call"] in KNOWN, kernel
        assert kernel["faults"] == [], kernel
        early.setdefault(kernel["kernel"], set()).update(kernel["early"])
    for kernel in found:
        assert set(kernel["declared"]) <= early[kernel["kernel"]], "READ_EARLY lists what nothing reads early"


def test_every_kernel_is_compiled() -> None:
    kernels = {
        node.name
        for file in (ROOT / "plugins/cuda/core_cuda").rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and "OVERLAP" in [argument.arg for argument in node.args.args]
    }
    assert kernels - {"wait_for_inputs", "start_next"} == set().union(*KERNELS.values())


PLANTED = {
    "right": [],
    "stores_early": ["stores before the wait on some way through it: @%p"],
    "counts_early": ["stores before the wait on some way through it: @%p"],
    "returns_early": ["ends before the wait on some way through it: ret"],
    "waits_on_one_side": ["stores before the wait", "ends before the wait", "reads through x before the wait"],
    "never_waits": ["ends before the wait on some way through it: ret"],
    "starts_early": ["lets the next kernel start before the wait"],
    "reads_early": ["reads through pair[1] before the wait, which READ_EARLY does not list"],
    "uses_a_guess": ["guesses guess before the wait and uses that after it, in "],
    "reads_by_the_first_cache": ["reads through guess before the wait by the L1 cache"],
    "follows_another": [],
    "follows_another, wrongly": ["reads through settled before the wait, and follows follows_another, not right"],
}
"""By call the faults that are found in a kernel of planted_overlaps.py, as they begin."""


@pytest.mark.interpreter
def test_planted_mistakes_are_found() -> None:
    found = {kernel["call"]: kernel for kernel in compiled("planted_overlaps.py", ())}
    assert set(found) == set(PLANTED)
    assert set(found["right"]["early"]) == {"weight", "guess"}
    for call, kernel in found.items():
        begins = zip(sorted(kernel["faults"]), sorted(PLANTED[call]), strict=True)
        assert all(fault.startswith(expected) for fault, expected in begins), kernel
