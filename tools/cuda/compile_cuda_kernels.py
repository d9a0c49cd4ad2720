"""Compile the plugin's kernels for a GPU that need not be there, and print what each one takes of it.

    python tools/cuda/compile_cuda_kernels.py [--capability 90] FILE.py … [NAME …]

A FILE defines `calls() -> Iterator[tuple[str, Callable[[], object]]]`: calls of ops on tensors of the host, whose
shapes and dtypes decide what is compiled; nothing is launched. NAMEs choose the calls whose names hold one of them.
Prints a JSON line per compiled kernel: call, kernel, num_warps, num_stages, shared (bytes per block), tensor (columns
of tensor memory), registers (per thread), stack (bytes per thread: spilled registers), products (instructions of the
matrix units, by their sizes). Kernels that may overlap with
the one before also have early, declared and faults (overlap_rule.py). A call that does not compile has a line with its
error instead, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from overlap_rule import overlap
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Most shared memory of a block by compute capability (CUDA C++ Programming Guide, table of technical specifications);
a GPU that is there says it itself."""


class AbsentDriver(CudaDriver):
    """What the compiler asks a driver for, answered for a GPU that is not there."""

    def __init__(self, capability: int) -> None:  # not the parent's: that one loads the driver library
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Return a number for it."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return where the calls' tensors are."""
        return torch.device("cpu")


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes per thread of the machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers is not None and stack is not None, text
    return int(registers[1]), int(stack[1])


def _products(ptx: str) -> list[str]:
    """Return the kinds of instructions of the matrix units, with the sizes of what each multiplies."""
    return sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.[\w.:]+", ptx)))


@contextmanager
def compile_only(capability: int, tell: Callable[[dict[str, Any]], None] | None = None) -> Iterator[None]:
    """Compile in place of launching, for GPUs of this compute capability (90 is 9.0); tell what each kernel takes.

    What is compiled lies in Triton's cache afterwards, and is found there by processes that launch it.
    """
    from core_cuda.ops import launching

    triton.runtime.driver.set_active(AbsentDriver(capability))
    answers: dict[str, Callable[[], Any]] = {
        "can_overlap": lambda: capability >= 90,
        "capability": lambda: divmod(capability, 10),
        "num_multiprocessors": lambda: 132,
        "shared_bytes": lambda: SHARED_KIB[capability] * 1024,
    }
    real = {name: getattr(launching, name) for name in answers}
    before = ""

    def compiled(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        nonlocal before
        made = kernel.warmup(*args, grid=grid, **options)
        if tell is not None:
            registers, stack = resources(made.asm["cubin"])
            told = {"kernel": kernel.__name__, "grid": list(grid), "num_warps": made.metadata.num_warps}
            told |= {"num_stages": made.metadata.num_stages, "shared": made.metadata.shared}
            told |= {"tensor": getattr(made.metadata, "tmem_size", None) or 0}
            told |= {"registers": registers, "stack": stack, "products": _products(made.asm["ptx"])}
            tell(told | (overlap(kernel, made, before) if options.get("OVERLAP") else {}))
        before = kernel.__name__

    for name, answer in answers.items():
        setattr(launching, name, answer)
    try:
        with launching.instead_of_launching(compiled):
            yield
    finally:
        for name, function in real.items():
            setattr(launching, name, function)


def calls_of(file: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the calls that a file defines, with their names."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield from module.calls()


def compile_calls(
    files: Sequence[Path], names: Sequence[str], capability: int, tell: Callable[[dict[str, Any]], None]
) -> bool:
    """Compile the calls whose names hold one of these words, or all; tell what each kernel takes, or its error.

    Returns whether all have compiled.
    """
    current, failed = "", False
    with compile_only(capability, lambda told: tell({"call": current} | told)):
        for current, call in (each for file in files for each in calls_of(file)):  # what is told names it
            if names and not any(name in current for name in names):
                continue
            try:
                call()
            except Exception as error:  # of whatever part of the compiler; the other calls are still of interest
                tell({"call": current, "error": f"{type(error).__name__}: {error.__cause__ or error}"})
                failed = True
    return not failed


def main() -> int:
    """Compile the calls of files; return 1 where one did not compile, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("words", nargs="+", metavar="FILE.py or NAME")
    options = parser.parse_args()
    files = [Path(word) for word in options.words if word.endswith(".py")]
    names = [word for word in options.words if not word.endswith(".py")]
    return not compile_calls(files, names, options.capability, lambda told: print(json.dumps(told), flush=True))


if __name__ == "__main__":
    sys.exit(main())
