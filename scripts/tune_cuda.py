"""Measure how the CUDA plugin computes products with few rows, and write what won as data of the plugin.

    python scripts/tune_cuda.py [--presets llama-1b,llama-8b] [--rows 1,2,4,8,16,32,64,128] [--processes 16]

For every linear layer of these shapes and every number of rows, all candidates and cuBLAS are timed in graphs whose
calls go through enough copies of the weight to miss the L2 cache, and checked against cuBLAS. Kernels are compiled in
parallel first. Writes `core_cuda/tuned/<product>.json` (or --out), and a table on the way.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from cuda_timing import num_sets, relative_error, time_us
from torch import Tensor
from torch.nn import functional

from core.bench.presets import PRESETS

WORST_ERROR = 1e-2
"""Largest relative error against cuBLAS; products of bfloat16 differ by the rounding of results, about 2e-3."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer; columns: of its result, behind the gate if it is gated."""

    columns: int
    depth: int
    gated: bool = False

    @property
    def weight_rows(self) -> int:
        """Rows of the weight."""
        return self.columns * (2 if self.gated else 1)


def layers(preset: str) -> Iterator[Layer]:
    """Yield the linear layers of a shape as the passes leave them: query, key and value merged, gate and up too."""
    fields: dict[str, Any] = dict(PRESETS[preset].fields)
    hidden, head = fields["hidden_size"], fields["head_dim"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    yield Layer((heads + 2 * kv_heads) * head, hidden)
    yield Layer(hidden, heads * head)
    if "num_experts" not in fields:
        yield Layer(fields["intermediate_size"], hidden, gated=True)
        yield Layer(hidden, fields["intermediate_size"])
    yield Layer(fields["vocab_size"], hidden)


def run_candidate(x: Tensor, weight: Tensor, layer: Layer, config: Any) -> Tensor:
    """Compute a layer by the plugin's kernel."""
    from core_cuda.ops.activation import Gate
    from core_cuda.ops.skinny import skinny_linear

    return skinny_linear(x, weight, gate=Gate("silu") if layer.gated else None, config=config)


def run_cublas(x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
    """Compute a layer by cuBLAS, and its gate by the plugin's kernel."""
    whole = functional.linear(x, weight)
    if not layer.gated:
        return whole
    gated: Tensor = torch.ops.core_cuda.gated_activation_fused(whole, kind="silu")
    return gated


def compile_one(task: tuple[int, Layer, Any, int]) -> str:
    """Compile what a candidate launches, in a process without a GPU; return what failed, or nothing."""
    rows, layer, config, capability = task
    from compile_cuda_kernels import compile_only

    try:
        with compile_only(capability):
            x, weight = (torch.empty(n, layer.depth, dtype=torch.bfloat16) for n in (rows, layer.weight_rows))
            run_candidate(x, weight, layer, config)
    except Exception as error:
        return f"{rows} x {layer}: {config}: {type(error).__name__}: {str(error).splitlines()[-1]}"
    return ""


def distinct(tasks: list[tuple[int, Layer, Any, int]]) -> list[tuple[int, Layer, Any, int]]:
    """Leave out tasks whose kernel another one compiles too: sizes and splits are no constants of it."""
    found = {}
    for rows, layer, config, capability in tasks:
        constants = {**asdict(config), "split_k": config.split_k > 1}
        tall = max(16, 1 << (rows - 1).bit_length()) if config.kernel == "tile" else 1
        even = layer.depth % config.block_k == 0
        found.setdefault((tall, layer.gated, even, *constants.values()), (rows, layer, config, capability))
    return list(found.values())


def measure(rows: int, layer: Layer, configs: list[Any], weights: list[Tensor]) -> dict[str, Any]:
    """Return the entry of a layer at a number of rows: what won, and how far it is from cuBLAS."""
    x = torch.randn(rows, layer.depth, device="cuda", dtype=torch.bfloat16)
    wanted = run_cublas(x, weights[0], layer).float()
    cublas = time_us(lambda weight: run_cublas(x, weight, layer), weights)
    best, winner, failures = cublas, None, []
    for config in configs:
        try:
            found = run_candidate(x, weights[0], layer, config).float()
            error = relative_error(found, wanted)
            if not error < WORST_ERROR:
                failures.append(f"{config}: wrong by {error:.2g}")
                continue
            taken = time_us(lambda weight, config=config: run_candidate(x, weight, layer, config), weights)
        except Exception as problem:
            failures.append(f"{config}: {type(problem).__name__}: {str(problem).splitlines()[0]}")
            continue
        if taken < best:
            best, winner = taken, config
    for failure in failures:
        print(f"  FAILED {rows} x {layer}: {failure}", file=sys.stderr)
    moved = weights[0].nbytes + rows * (layer.depth + layer.columns) * 2
    return {
        **asdict(layer),
        "rows": rows,
        "config": asdict(winner) if winner else None,
        "us": round(best, 2),
        "cublas_us": round(cublas, 2),
        "gbytes_per_s": round(moved / best / 1e3),
        "failed": len(failures),
    }


def main(
    presets: str = typer.Option("llama-1b,llama-8b,qwen3-8b,qwen3-30b-a3b", help="Shapes, by name."),
    rows: str = typer.Option("1,2,4,8,16,32,64,128", help="Numbers of rows to measure."),
    out: Path | None = typer.Option(None, help="File to write; default: the plugin's own."),
    processes: int = typer.Option(os.cpu_count() or 1, help="Processes that compile."),
) -> None:
    """Tune products with few rows on the current GPU."""
    from core_cuda import tuned
    from core_cuda.ops.skinny_configs import candidates

    counts = [int(count) for count in rows.split(",")]
    wanted = list(dict.fromkeys(layer for preset in presets.split(",") for layer in layers(preset)))
    major, minor = torch.cuda.get_device_capability()
    problems = [
        (count, layer, list(candidates(count, layer.columns, layer.depth, gated=layer.gated)))
        for layer in wanted
        for count in counts
    ]
    tasks = distinct([(n, layer, config, 10 * major + minor) for n, layer, configs in problems for config in configs])
    print(f"compiling {len(tasks)} kernels in {processes} processes")
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for failure in filter(None, pool.imap_unordered(compile_one, tasks)):
            print(f"  FAILED to compile {failure}", file=sys.stderr)
    entries = []
    for layer in wanted:
        size = layer.weight_rows * layer.depth * 2
        weights = [
            torch.randn(layer.weight_rows, layer.depth, device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(num_sets(size))
        ]
        for count, each, configs in problems:
            if each == layer:
                entries.append(measure(count, layer, configs, weights))
                print(json.dumps(entries[-1]), flush=True)
    product = torch.cuda.get_device_name()
    path = out or Path(tuned.__file__).parent / tuned.file_name(product)
    known = json.loads(path.read_text()) if path.is_file() else {}
    versions = {"torch": torch.__version__, "triton": __import__("triton").__version__, "cuda": torch.version.cuda}
    document = {**known, "device": product, "versions": versions, "linear": entries}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
