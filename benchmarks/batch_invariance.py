"""Measure what `deterministic="batch"` costs a decode step and a prompt: engines with it and without take turns.

    python benchmarks/batch_invariance.py [--device cpu] [--model llama-100m] [--dtype bfloat16] [--batch 1 4 16]

Without it, an engine runs lowering `inline` and, with `--lowering`, another one; ratios are to the first.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch

import core
from core.bench.presets import find_preset, random_model
from core.device import Device
from core.engine.serve.engine import Engine


def make_engine(args: argparse.Namespace, device: Device, lowering: str, deterministic: bool) -> Engine:
    """Compile the buckets of the batches, and one for prompts."""
    config = find_preset(args.model).config()
    loaded = random_model(config, torch_device=device.torch_device, dtype=getattr(torch, args.dtype))
    return Engine(
        loaded,
        device,
        core.EngineConfig(
            max_num_seqs=max(args.batch),
            max_model_len=args.prompt + args.steps + 32,
            decode_buckets=tuple(sorted(args.batch)),
            prefill_buckets=(max(args.prompt, max(args.batch)),),
            decode_steps=1,
            sampling=("greedy",),
            prefix_caching=False,
            deterministic="batch" if deterministic else None,
            options=core.CompileOptions(lowering=lowering),
        ),
    )


def times(engine: Engine, batch: int, prompt: int, steps: int) -> tuple[float, float]:
    """Return the milliseconds of a prompt alone in its step, and the median of decode steps of a batch."""
    params = core.SamplingParams(max_new_tokens=steps + batch + 2, ignore_eos=True)
    prompts, found = [], []
    for index in range(batch):
        engine.add_request([(7 * index + place) % 1000 for place in range(prompt - (batch if index else 0))], params)
        start = time.perf_counter()
        engine.step()
        prompts.append(1e3 * (time.perf_counter() - start))
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        found.append(1e3 * (time.perf_counter() - start))
    while engine.has_unfinished:
        engine.step()
    return prompts[0], statistics.median(found)


def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lowering", default=None)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    device = core.select_device(args.device)
    engines = {"inline": make_engine(args, device, "inline", False), "batch": make_engine(args, device, "inline", True)}
    if args.lowering is not None:
        engines[args.lowering] = make_engine(args, device, args.lowering, False)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for round_index in range(args.rounds + 1):  # the first warms up
        for batch in args.batch:
            for name, engine in engines.items():
                prompt_ms, step_ms = times(engine, batch, args.prompt, args.steps)
                for what, taken in ((f"prompt of {args.prompt}", prompt_ms), (f"decode {batch}", step_ms)):
                    found[name].setdefault(what, []).extend([taken] if round_index else [])
    report = {
        name: {
            what: {
                "median_ms": round(statistics.median(each), 3),
                "ratio": round(statistics.median(map(lambda a, b: a / b, each, found["inline"][what])), 3),
            }
            for what, each in taken.items()
        }
        for name, taken in found.items()
    }
    about = {"device": device.capabilities.device_name, "torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({**about, **vars(args), "threads": torch.get_num_threads(), "found": report}, indent=1))


if __name__ == "__main__":
    main()
