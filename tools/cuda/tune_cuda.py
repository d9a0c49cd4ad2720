"""Measure how the CUDA plugin's kernels are best configured on this GPU, and write what won as data of the plugin.

    python tools/cuda/tune_cuda.py [--presets llama-1b,llama-8b] [--only linear] [--rows 1,2,4,8,16,32,64,128]

For the linear layers of these shapes at every number of rows, and for their attention in decode and prefill, all
candidates (and cuBLAS for linears) are timed in graphs whose calls go through more memory than the L2 cache holds, and
checked against torch. Kernels are compiled in parallel first. Writes `core_cuda/tuned/<product>.json`, or --out.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from cuda_problems import Problem, problems
from cuda_timing import num_sets, relative_error, require_gpu, time_us

WORST_ERROR = 1e-2
"""Largest relative error against torch; results of bfloat16 differ by their rounding, about 2e-3."""
_TOLD = 8  # the best configurations of a shape that are printed


def compile_one(task: tuple[Problem, Any, int]) -> str:
    """Compile what a candidate launches, in a process without a GPU; return what failed, or nothing."""
    problem, config, capability = task
    from compile_cuda_kernels import compile_only

    try:
        with compile_only(capability):
            problem.run(problem.make("cpu"), config)
    except Exception as error:
        return f"{problem}: {config}: {type(error).__name__}: {(str(error).splitlines() or [''])[-1]}"
    return ""


def of_library(config: Any) -> bool:
    """Return whether a candidate is a kernel of torch's libraries, which needs no compiling."""
    from core_cuda.ops.linear.scaled import WAYS

    return getattr(config, "kernel", "") in WAYS


def compile_all(found: Iterable[Problem], processes: int) -> None:
    """Compile the kernels of all candidates, each once, in parallel; print what fails."""
    major, minor = torch.cuda.get_device_capability()
    every = ((p, config) for p in found for config in p.candidates() if not of_library(config))
    tasks = {(p.op, *p.same_kernel(config)): (p, config, 10 * major + minor) for p, config in every}
    print(f"compiling {len(tasks)} kernels in {processes} processes")
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for failure in filter(None, pool.imap_unordered(compile_one, tasks.values())):
            print(f"  FAILED to compile {failure}", file=sys.stderr)


def ranked(problem: Problem) -> tuple[list[tuple[float, Any]], int]:
    """Return the microseconds of each configuration, the fastest first, None being the library; and how many failed."""
    sets: list[Any] = [problem.make("cuda") for _ in range(num_sets(problem.num_bytes))]
    wanted = problem.wanted(sets[0])
    found: list[tuple[float, Any]] = [] if problem.library is None else [(time_us(problem.library, sets), None)]
    failures = []
    for config in problem.candidates():
        try:
            error = relative_error(problem.run(sets[0], config), wanted)
            if not error < WORST_ERROR:
                failures.append(f"{config}: wrong by {error:.2g}")
                continue
            found.append((time_us(lambda data, config=config: problem.run(data, config), sets), config))
        except Exception as reason:
            failures.append(f"{config}: {type(reason).__name__}: {(str(reason).splitlines() or [''])[0]}")
    for failure in failures:
        print(f"  FAILED {problem}: {failure}", file=sys.stderr)
    found.sort(key=lambda each: each[0])
    for taken, config in found[:_TOLD]:
        print(f"  {taken:.2f} us {config}", file=sys.stderr)
    return found, len(failures)


def measure(problem: Problem) -> dict[str, Any]:
    """Return the entry of a problem: what won, and how far it is from the library."""
    found, failed = ranked(problem)
    taken, winner = found[0]
    library = [time for time, config in found if config is None]
    return {
        "shape": dict(problem.shape),
        "config": asdict(winner) if winner else None,
        "us": round(taken, 2),
        "library_us": round(library[0], 2) if problem.library is not None else None,
        "gbytes_per_s": round(problem.num_bytes / taken / 1e3),
        "failed": failed,
    }


def keep(path: Path, about: Mapping[str, Any], op: str, entry: Mapping[str, Any]) -> None:
    """Put an entry into a file in place of what it knows of this op at this shape; all else stays."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    others = [other for other in known.get(op, ()) if other["shape"] != entry["shape"]]
    path.write_text(json.dumps({**known, **about, op: [*others, entry]}, indent=1) + "\n")


def main(
    presets: str = typer.Option("llama-1b,llama-8b,qwen3-8b,qwen3-30b-a3b", help="Shapes, by name."),
    only: str = typer.Option("", help="Tune only problems whose op or text this expression finds; others are kept."),
    rows: str = typer.Option("1,2,4,8,16,32,64,128", help="Numbers of rows of linear layers."),
    out: Path | None = typer.Option(None, help="File to write; default: the plugin's own."),
    processes: int = typer.Option(os.cpu_count() or 1, help="Processes that compile."),
) -> None:
    """Tune the kernels on the current GPU."""
    require_gpu()
    from core_cuda import tuned

    counts = [int(count) for count in rows.split(",")]
    every = (problem for preset in presets.split(",") for problem in problems(preset, counts))
    found = dict.fromkeys(problem for problem in every if re.search(only, f"{problem.op} {problem}"))
    compile_all(found, processes)
    product = torch.cuda.get_device_name()
    path = out or Path(tuned.__file__).parent / tuned.file_name(product)
    versions = {"torch": torch.__version__, "triton": __import__("triton").__version__, "cuda": torch.version.cuda}
    for problem in found:
        entry = measure(problem)
        keep(path, {"device": product, "versions": versions}, problem.op, entry)  # at once: a tuning may be interrupted
        print(json.dumps({"op": problem.op, **entry}), flush=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
