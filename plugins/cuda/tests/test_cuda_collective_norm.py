"""core_cuda/collective_norm.py: what its kernel takes and compiles to, and with two GPUs what it gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from core.common.ops.collective import ALL_REDUCE_ADD_RMS_NORM
from core_cuda.collective_norm import IMPLEMENTATIONS
from core_cuda.ops.summing import MAX_ROW_BYTES, shares_of
from core_cuda.symmetric import AREA_BYTES, EMPTY, HALVES, Shared

WIDEST = MAX_ROW_BYTES // 2
"""In halves."""
ROOT = Path(__file__).resolve().parents[3]
WORKER, SIMULATED = (Path(__file__).with_name(f"{name}_worker.py") for name in ("collective_norm", "summing"))


def asked(width: int = 48, dtype: torch.dtype = torch.bfloat16, **options: Any) -> str | None:
    x = torch.ones(2, width, dtype=dtype)
    call = {"x": x, "residual": x, "weight": x[0], "eps": 1e-5, "group": "", **options}
    (one,) = (each for each in IMPLEMENTATIONS if each.op == ALL_REDUCE_ADD_RMS_NORM.qualified_name)
    return one.condition(ALL_REDUCE_ADD_RMS_NORM.bind((), call))


def test_calls_that_the_kernel_does_not_take() -> None:
    assert asked() == "nobody shares the group"
    assert "x is torch.float64" in str(asked(dtype=torch.float64))
    assert "compute_dtype is torch.float16" in str(asked(compute_dtype=torch.float16))
    assert f"rows have {WIDEST + 1} elements" in str(asked(WIDEST + 1))
    assert asked(WIDEST) == "nobody shares the group"
    assert f"the kernel takes {WIDEST // 2} at most" in str(asked(WIDEST, torch.float32))


def shared(size: int = 2, num_programs: int = 132) -> Shared:
    memory = torch.empty(16, dtype=torch.uint8)
    turns = torch.zeros(num_programs, dtype=torch.int32)
    area, places = AREA_BYTES[size], tuple(number << 40 for number in range(1, size + 1))
    return Shared(
        rank=1,
        size=size,
        num_programs=num_programs,
        area_bytes=area,
        mine=memory,
        places=places,
        handle=None,
        turns=turns,
    )


@pytest.mark.parametrize("width", [0, 64, 333, 5120, 8192, WIDEST])
def test_what_is_shared_out_fits_the_areas_and_runs_at_once(width: int) -> None:
    own, taken = shared(), 0
    for num_rows in (1, 3, 100, 131, 133, 512, 529, 5000):
        num_elements = num_rows * (width or 1000)
        for element_size in (2, 4):
            shares = shares_of(own, num_elements, element_size, width)
            if shares is None:
                continue
            taken += 1
            tile = shares.rows * shares.width
            tiles = -(-num_elements // tile)
            assert 0 < shares.num_programs == min(tiles, own.num_programs)
            assert -(-tiles // own.num_programs) * tile * element_size <= own.area_bytes
    assert taken > 4


def test_what_is_empty_or_too_large_goes_by_nccl() -> None:
    assert shares_of(shared(), 0, 2, 64) is None and shares_of(shared(), 0, 2) is None
    assert shares_of(shared(), 528 * 8192, 2, 8192) is not None
    assert shares_of(shared(), 529 * 8192, 2, 8192) is None
    assert shares_of(shared(), 2 * WIDEST, 2, 2 * WIDEST) is None


COMPILED = """
import json, sys
sys.path[:0] = ["tools/cuda", "plugins/cuda/tests"]
import torch
from compile_cuda_kernels import compile_only, resources
from overlap_rule import overlap
from core_cuda.ops.summing import launch_sum, shares_of
from core_cuda.ops import launching
from core_cuda.ops.norm.norms import options_of
from test_cuda_collective_norm import shared

def launch(kernel, grid, **arguments):
    made = kernel.warmup(grid=grid, **arguments)
    registers, stack = resources(made.asm["cubin"])
    print(json.dumps({"stack": stack, "registers": registers, "warps": made.metadata.num_warps, "ptx": made.asm["ptx"],
                      "faults": overlap(kernel, made, "")["faults"]}))

both = (torch.bfloat16, torch.float32)
SHAPES = {(1, 8192): both, (512, 4096): both, (3, 16384): both[:1], (5, 333): both}
with compile_only(90):
    launching.launch = launch
    for shape, dtypes in SHAPES.items():
        for dtype in dtypes:
            x, weight = torch.empty(shape, dtype=dtype), torch.empty(shape[-1], dtype=dtype)
            norm = options_of(weight, 1e-5, 0.0, dtype, (dtype, None, None))
            for options in {}, {"norm": norm}, {"norm": norm, "residual": x, "total": x}:
                shares = shares_of(shared(), x.numel(), x.element_size(), shape[-1] if options else 0)
                launch_sum(shared(), shares, x, x, **options)
"""


@pytest.mark.slow
def test_the_kernel_compiles_and_waits_and_fits() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "plugins/cuda"), str(ROOT)])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 21
    for each in made:
        assert each["faults"] == [] and each["stack"] <= 128, {**each, "ptx": ""}
        assert each["registers"] * each["warps"] * 32 <= 65536
    # Of 8192 elements a thread sends and reads 8 at once, and what it waits for it reads past the L1 cache.
    assert "ld.volatile.global.v4.b32" in made[0]["ptx"] and "ld.volatile.global.v4.b32" in made[2]["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_sum_in_the_interpreter_through_memory_that_they_map(size: int, tmp_path: Path) -> None:
    """Several calls of all kinds, of which one process or another comes late to some; each sends to halves in turns."""
    num_programs, num_calls = 3, 9
    num_bytes = HALVES * size * num_programs * AREA_BYTES[size]
    for rank in range(size):
        (tmp_path / str(rank)).write_bytes(bytes([EMPTY]) * num_bytes)
    places = os.pathsep.join([str(ROOT / "plugins/cuda"), str(ROOT)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places}
    ranks = [
        subprocess.Popen(
            [sys.executable, SIMULATED, *map(str, (rank, size, num_programs, num_calls, tmp_path))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [each.communicate(timeout=150)[0] for each in ranks]
    finally:
        for each in ranks:  # where one has failed, the others wait for it
            each.kill()
    assert [each.returncode for each in ranks] == [0] * size, said
    assert all(text == f"{num_calls} calls\n" for text in said), said


@pytest.mark.gpu
def test_two_gpus_sum_and_normalise_in_graphs_too() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for found in json.loads(done.stdout.strip().splitlines()[-1]):
        assert found["joined"] == "" and found["faults"] == {} and all(found["options"].values()), found
        assert found["kernels"] == ["sum_kernel"], found
        assert found["wrong_replays"] == 0 and found["wrong_when_late"] == 0, found
