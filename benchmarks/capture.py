"""Measure what capturing a model of a given shape costs: seconds and bytes per bucket, and what a step then takes.

Weights are random. Decode is captured whole over batch sizes, prefill piecewise over token counts, as the engine does.
The memory of the graphs is set against the largest activation of an eager run, which a pool can't be smaller than.

    python benchmarks/capture.py --device cuda --preset llama-8b --max-num-seqs 256 --context 1024 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import core
from core.bench.model import open_model
from core.bench.presets import PRESETS
from core.common.graphs.backend import GraphKey
from core.device import Device
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig


def peak_of(device: Device, run: Callable[[], object]) -> int:
    """Return the bytes that a run takes at its peak, beyond what was there before."""
    device.parts.empty_cache()
    device.synchronize()
    before = device.parts.memory().used_bytes
    device.parts.reset_peak_memory()
    with torch.no_grad():
        run()
    device.synchronize()
    return device.parts.memory().peak_bytes - before


def decode_activation(engine: Engine, device: Device, key: GraphKey) -> int:
    """Return the peak of one eager run of the function that the largest decode bucket captured."""
    program: Any = engine._runner.program  # type: ignore[attr-defined]  # the paged runner's
    inputs = {name: tensor.clone() for name, tensor in program.inputs(key).items()}
    return peak_of(device, lambda: program._models[key.phase](**inputs, **dict(key.guards)))


def prefill_activation(loaded: Any, device: Device, num_tokens: int, context: int) -> int:
    """Return the peak of the unmodified model on as many tokens as the largest prefill bucket, no cache written."""
    ids = torch.zeros(
        num_tokens // context or 1, min(num_tokens, context), dtype=torch.int64, device=device.torch_device
    )
    return peak_of(device, lambda: loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1))


def replay_times(engine: Engine, device: Device, keys: list[GraphKey], rounds: int = 20) -> dict[str, float]:
    """Return the median milliseconds of a replay by key, the device waited for each time."""
    program: Any = engine._runner.program  # type: ignore[attr-defined]  # the paged runner's
    found = {}
    for key in keys:
        samples = []
        for _ in range(rounds):
            device.synchronize()
            start = time.perf_counter()
            program.replay(key)
            device.synchronize()
            samples.append((time.perf_counter() - start) * 1e3)
        found[str(key)] = statistics.median(samples)
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Capture, and return the account."""
    device = core.select_device(arguments.device)
    start = time.perf_counter()
    loaded, _ = open_model(None, arguments.preset, device, arguments.dtype)
    build_s = time.perf_counter() - start
    config = EngineConfig(
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.context,
        prefill_buckets=tuple(arguments.prefill),
        sampling=("greedy",),
        options=core.CompileOptions(lowering=arguments.lowering),
    )
    start = time.perf_counter()
    with Engine(loaded, device, config) as engine:
        engine_s = time.perf_counter() - start
        report = engine.report()
        print(report)
        decode = [bucket for bucket in report.buckets if bucket.key.phase == "decode"]
        prefill = [bucket for bucket in report.buckets if bucket.key.phase == "prefill"]
        activations = {"decode": decode_activation(engine, device, decode[0].key)}
        times = replay_times(engine, device, [b.key for b in (*decode[:1], *decode[-1:], *prefill)])
    activations["prefill"] = prefill_activation(loaded, device, max(arguments.prefill), arguments.context)
    beyond = report.graph_bytes - max(activations.values())
    return {
        "environment": {
            "device": str(device),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "preset": arguments.preset,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "context": arguments.context,
            "lowering": report.lowering,
            "modes": report.modes,
        },
        "parameters_billion": loaded.num_parameters / 1e9,
        "build_s": build_s,
        "engine_s": engine_s,
        "trace_s": {trace.phase: trace.trace_s + trace.passes_s for trace in report.traces},
        "decode": {"buckets": len(decode), "capture_s": sum(b.capture_s for b in decode)},
        "prefill": {
            "buckets": len(prefill),
            "capture_s": sum(b.capture_s for b in prefill),
            "graphs": [b.num_graphs for b in prefill],
        },
        "graph_bytes": report.graph_bytes,
        "largest_eager_activation_bytes": activations,
        "beyond_activation_percent_of_card": 100 * beyond / device.parts.memory().total_bytes,
        "bytes_by_bucket": {str(b.key): b.num_bytes for b in report.buckets},
        "replay_ms": times,
    }


def main() -> None:
    """Print the account as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny-llama")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--prefill", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--lowering", default=None)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure(arguments)
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
