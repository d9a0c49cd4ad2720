"""Every kernel compiles for compute capability 9.0 on any machine, some of each family for 8.0, 8.9 and 10.0 as well;
they fit what a multiprocessor has, and wait for the kernel that they overlap with.

What the interpreter runs is Python; this is what finds the rest: types, layouts, registers, shared memory, and the
order that the compiler leaves instructions in.
"""

from __future__ import annotations

import ast
import json
import os
import re
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
FETCHING = 192
"""The same, where the warps that only fetch have few registers, so that those that multiply have more."""
KNOWN = {("mqa drafts 512", c) for c in SHARED} | {("gemma 2", 100), ("8b codes, coded", 89), ("streamed int4, 1", 90)}
"""Calls, by capability, whose kernel spills more: heads of 512 with 64 rows, and of 256, are served there, not fast; 18
registers of deep tiles of 4-bit codes were the fastest on an H100 all the same."""
CALLS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "lora": (),
    "weight_only": (),
    "rows": ("1", "sample", "argmax", "whole", "layer_norm 4x65536"),
    "attention": (),
    "prefill": ("8b", "1b", "gemma", "head"),
    "moe": ("qwen3", "route"),
    "quantized_moe": ("qwen3",),
    "rotary": ("8b", "1b", "qwen"),
    "recurrent": (),
    "flashinfer": (),
    "alike": (),
}
"""By family the words that a call's name must hold one of; none takes all."""
KERNELS: dict[str, set[str]] = {
    "linear": {"_row_kernel", "_tile_kernel", "hopper_linear_kernel", "_scale_kernel"},
    "lora": {"shrink_kernel", "expand_kernel"},
    "weight_only": {"coded_kernel", "hopper_coded_kernel", "_dequantize_kernel"},
    "rows": {
        *("norm_kernel", "long_norm_kernel", "pair_norm_kernel", "normed_sum_kernel", "gated_norm_kernel"),
        *("_gate_kernel", "squared_relu_kernel", "gather_kernel", "_rows_kernel", "_parts_kernel"),
        "_whole_scale_kernel",
        *("_argmax_kernel", "bounds_kernel", "histogram_kernel", "choose_kernel"),
    },
    "attention": {"decode_kernel"},
    "prefill": {"prefill_kernel", "hopper_kernel", "decode_kernel", "_write_kernel"},
    "moe": {
        *("row_up_kernel", "row_down_kernel", "sort_kernel", "product_kernel", "sum_kernel", "_route_kernel"),
        *("count_kernel", "place_kernel", "order_kernel", "weighted_sum_kernel", "gated_expert_kernel"),
        *("_row_kernel", "hopper_linear_kernel"),
    },
    "quantized_moe": {"quantized_product_kernel"},
    "rotary": {"rotary_kernel", "_table_kernel", "prefill_kernel", "hopper_kernel"},
    "recurrent": {
        *("_convolution_kernel", "_packed_kernel", "_states_kernel", "_delta_kernel", "_state_space_kernel"),
        *("_features_kernel", "delta_gates_kernel"),
        *("delta_inverses_kernel", "delta_states_kernel", "delta_outputs_kernel"),
        *("steps_kernel", "passing_kernel", "outputs_kernel"),
    },
    "flashinfer": {"tiles_kernel", "chunks_kernel", "works_kernel"},
    "alike": {"alike_linear_kernel", "alike_attention_kernel", "join_kernel", "rotary_kernel", "_write_kernel"},
}
"""By family the kernels that its calls launch."""


ALONE = {"hopper_kernel"}
"""Kernels that do not overlap with the one before."""
OTHERS = (
    *("linear 1 x 4096", "linear 8 x 6144", "linear 64 x 28672", "codes 1 x 4096", "codes 8 x 6144"),
    *("lora 8 x qkv", "lora 64 x down"),
    *("weight-only int", "weight-only fp8", "int8 by int8", "kind int", "kind fp8", "numbers of int", "numbers of fp8"),
    *(
        "rms_norm 1x4096",
        "two_rms_norms 64x4096",
        "normed_sum 64x4096",
        "gated_norm 64x4096",
        "squared_relu 64x21504",
        "gather_columns 64x",
        "quantize token 1x4096",
        "quantize int8 1x4096",
        "gate_quantize group 1x8192",
        "quantize whole",
    ),
    *("sample 1", "argmax 8", "8b decode 8", "mqa decode 8", "mqa drafts 512", "8b fp32", "8b codes 8"),
    *("8b 4096 in 8", "gemma 2", "8b codes, coded", "qwen3 8", "mixtral 64", "qwen3 4096", "route qwen3"),
    *("qwen3 pairs 64", "qwen3 sum 64", "qwen3 shared gate 64"),
    *("qwen3 8 experts", "qwen3 32768 experts"),
    *("convolution 64", "delta 64", "gates 64", "kimi 1", "state space 64", "state space of prompts"),
    *("alike linear 1024 x 6144", "alike attention 128, 64"),
    *("8b rotary 64", "8b table 64", "8b qk norm 64", "8b codes, half 64"),
)
"""Words of the calls that are compiled for other capabilities, of all families."""
IN_CODES = ("codes", "token", "group", "fp8")
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
        most = FETCHING if kernel["kernel"] == "hopper_kernel" else SPILLS[capability]
        assert kernel["stack"] <= most or (kernel["call"], capability) in KNOWN, kernel


@pytest.mark.interpreter
@pytest.mark.parametrize("family", CALLS)
def test_kernels_compile_and_fit_and_wait(family: str) -> None:
    found = compiled(90, file_of(family), *CALLS[family])
    assert {kernel["kernel"] for kernel in found} == KERNELS[family]
    check(90, found)
    early: dict[str, set[str]] = {}
    for kernel in found:
        if kernel["kernel"] in ALONE:
            continue
        assert kernel["faults"] == [], kernel
        early.setdefault(kernel["kernel"], set()).update(kernel["early"])
    for kernel in found:
        assert kernel["kernel"] in ALONE or set(kernel["declared"]) <= early[kernel["kernel"]], (
            "READ_EARLY lists what nothing reads early"
        )


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


@pytest.mark.interpreter
@pytest.mark.parametrize("capability", [80, 90])
def test_what_computes_rows_alike_has_the_same_products_for_any_number(capability: int) -> None:
    found: dict[str, set[tuple[str, ...]]] = {}
    for kernel in compiled(capability, file_of("alike"), "bfloat16", "alike attention", failing=False):
        if kernel["kernel"] in ("alike_linear_kernel", "alike_attention_kernel"):
            shape = re.sub(r"(linear|, )[\d ]+(x|of \d+)", r"\1", kernel["call"])  # all but the number of rows
            found.setdefault(shape, set()).add(tuple(kernel["products"]))
    assert len(found) >= 6
    assert all(len(each) == 1 and next(iter(each)) for each in found.values()), found


def _is_gluon_kernel(node: ast.FunctionDef) -> bool:
    return node.name.endswith("_kernel") and [ast.unparse(d) for d in node.decorator_list] == ["gluon.jit"]


def test_every_kernel_is_compiled() -> None:
    kernels = {
        node.name
        for file in (ROOT / "plugins/cuda/core_cuda").rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and ("OVERLAP" in [argument.arg for argument in node.args.args] or _is_gluon_kernel(node))
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
    "confirms_a_guess": [],
    "keeps_a_guess": ["guesses guess before the wait and uses that after it, in "],
    "reads_by_the_first_cache": ["reads through guess before the wait by the L1 cache"],
    "follows_another": [],
    "follows_another, wrongly": ["reads through settled before the wait, and follows follows_another, not right"],
}
"""By call the faults that are found in a kernel of planted_overlaps.py, as they begin."""


@pytest.mark.interpreter
def test_planted_mistakes_are_found() -> None:
    found = {kernel["call"]: kernel for kernel in compiled(90, str(SUPPORT / "planted_overlaps.py"))}
    assert set(found) == set(PLANTED)
    assert set(found["right"]["early"]) == {"weight", "guess"}
    for call, kernel in found.items():
        begins = zip(sorted(kernel["faults"]), sorted(PLANTED[call]), strict=True)
        assert all(fault.startswith(expected) for fault, expected in begins), kernel
