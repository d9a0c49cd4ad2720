"""Measure the section "Processor" of docs/performance.md: models, batches and contexts, on one and two threads.

    python tools/processor_bench.py docs/performance/processor
    python tools/performance_page.py docs/performance

Each model, context and number of threads is a run of `core bench --device cpu` with the peers that are installed, in a
process of its own, whose document is NAME-cCONTEXT-tTHREADS.json. `--preset FILE`, a config.json, adds its shape. A
document that is there is kept; delete it to measure again. `--only` takes a part of these names. `--avx2` limits code
to AVX2, as on older processors, and writes documents of its own. Each peer holds the weights once more, and some twice:
llama-1b with all peers takes about 24 GiB, so `--subjects` may have to name fewer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One model at one context."""

    name: str
    #: Arguments that choose the model.
    model: tuple[str, ...]
    dtype: str
    batches: str
    context: int


_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Limits kernels of torch, of Inductor and of the plugin, and oneDNN's; llama.cpp and ONNX Runtime know neither."""


def _preset(name: str, batches: str, context: int = 128, scheme: str = "") -> Run:
    quantized = ("--quantize", scheme) if scheme else ()
    title = f"{name}-{scheme}" if scheme else name
    return Run(name=title, model=("--preset", name, *quantized), dtype="bfloat16", batches=batches, context=context)


RUNS = (
    Run(name="embedded", model=("core/assets/tiny_llama",), dtype="float32", batches="1,4", context=128),
    _preset("llama-100m", "1,4,8"),
    _preset("llama-100m", "1,4,8", 2048),
    *(_preset("llama-100m", "1,4", scheme=scheme) for scheme in ("int8", "w8a16", "w4a16-g32")),
    _preset("qwen3-0.6b", "1,4"),
    _preset("llama-1b", "1,4"),
)


def planned(
    folder: Path, threads: list[int], more: Sequence[Path] = (), *, suffix: str = ""
) -> Iterator[tuple[Run, int, Path]]:
    """Yield each run, its threads, and its document; `more` are config.json files of further shapes."""
    added = (replace(_preset(str(file), "1,4"), name=file.stem) for file in more)
    for run in (*RUNS, *added):
        for count in threads:
            yield run, count, folder / f"{run.name}{suffix}-c{run.context}-t{count}.json"


def busy_processors(seconds: float = 2.0) -> float:
    """Return how many processors were busy during so many seconds: the load average still knows the run before."""

    def times() -> tuple[int, int]:
        user, nice, system, idle, waiting, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
        return idle + waiting, user + nice + system + idle + waiting + sum(rest[:3])

    idle, total = times()
    time.sleep(seconds)
    later_idle, later = times()
    return (os.cpu_count() or 1) * (1 - (later_idle - idle) / max(later - total, 1))


def main(
    folder: Path,
    rounds: int = typer.Option(11, help="Of each cell."),
    steps: int = typer.Option(32, help="Decode steps of a round; of a large model fewer say as much."),
    threads: str = typer.Option("1,2", help="Numbers of threads, comma-separated."),
    subjects: str = typer.Option("eager,compile,peers,core", help="As for core bench."),
    only: str = typer.Option("", help="Measure only documents whose name has this part."),
    preset: list[Path] = typer.Option([], metavar="FILE", help="Measure the shape of this config.json too."),
    peer_python: list[str] = typer.Option([], help="As for core bench."),
    avx2: bool = typer.Option(False, "--avx2", help="Limit code to AVX2."),
) -> None:
    """Measure what is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for run, count, path in planned(
        folder, [int(each) for each in threads.split(",")], preset, suffix="-avx2" if avx2 else ""
    ):
        if path.is_file() or only not in path.name:
            continue
        load, start = busy_processors(), time.perf_counter()
        command = [sys.executable, "-m", "core", "bench", *run.model, "--device", "cpu", "--dtype", run.dtype]
        command += ["--batch", run.batches, "--context", str(run.context), "--prefill", "", "--subjects", subjects]
        command += ["--rounds", str(rounds), "--steps", str(steps), "--json", str(path.with_suffix(".part"))]
        command += [part for each in peer_python for part in ("--peer-python", each)]
        limits = {"OMP_NUM_THREADS": str(count), **(_AVX2 if avx2 else {})}
        code = subprocess.run(command, env=os.environ | limits, check=False).returncode
        if not path.with_suffix(".part").is_file():
            failures.append(path.name)
            continue
        document = json.loads(path.with_suffix(".part").read_text(encoding="utf-8"))
        path.with_suffix(".part").unlink()
        title = f"{run.name} with AVX2 alone" if avx2 else run.name
        document |= {"context": run.context, "name": title, "load_before": round(load, 2)}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"{path}: exit code {code}, {time.perf_counter() - start:.0f} s", flush=True)
    if failures:
        raise SystemExit(f"not measured: {', '.join(failures)}")


if __name__ == "__main__":
    typer.run(main)
