"""Measure what adapters (LoRA) cost a decode step: an engine without room for them, one whose batch has none, one whose
sequences have an adapter each, in turns and as ratios to the first.

    python benchmarks/lora_step.py [--device cpu] [--model llama-100m] [--dtype bfloat16] [--batch 4] [--rank 16]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import core
from core.bench.presets import find_preset, random_model
from core.device import Device
from core.engine.serve.engine import Engine

PROMPT_TOKENS = 32


def write_adapter(folder: Path, engine: Engine, rank: int, seed: int) -> Path:
    """Write an adapter on every layer that may have one, of small random numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    adapters = engine._runner.adapters
    assert adapters is not None
    for path, layer in adapters.layers.items():
        shapes = {"A": (rank, layer.a.shape[1]), "B": (layer.b.shape[0], rank)}
        for side, shape in shapes.items():
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = torch.randn(shape, generator=generator) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def make_engine(model: str, dtype: str, device: Device, batch: int, **fields: Any) -> Engine:
    """Compile one bucket of each phase."""
    config = find_preset(model).config()
    loaded = random_model(config, torch_device=device.torch_device, dtype=getattr(torch, dtype))
    options = core.CompileOptions(lowering=fields.pop("lowering"))
    return Engine(
        loaded,
        device,
        core.EngineConfig(
            max_num_seqs=batch,
            max_model_len=512,
            decode_buckets=(batch,),
            prefill_buckets=(PROMPT_TOKENS * batch,),
            sampling=("greedy",),
            prefix_caching=False,
            options=options,
            **fields,
        ),
    )


def step_times(engine: Engine, batch: int, steps: int, loras: list[str | None]) -> list[float]:
    """Return the milliseconds of each decode step of one batch."""
    params = core.SamplingParams(max_new_tokens=steps + 3, ignore_eos=True)
    for index, lora in enumerate(loras):
        engine.add_request([(7 * index + place) % 1000 for place in range(PROMPT_TOKENS)], params, lora=lora)
    engine.step()
    engine.step()
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        found.append(1e3 * (time.perf_counter() - start))
    while engine.has_unfinished:
        engine.step()
    return found


def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lowering", default=None)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    device, batch = core.select_device(args.device), args.batch
    given = (args.model, args.dtype, device, batch)
    rooms = {"max_loras": batch, "max_lora_rank": args.rank}
    with (
        tempfile.TemporaryDirectory() as folder,
        make_engine(*given, lowering=args.lowering) as plain,
        make_engine(*given, lowering=args.lowering, **rooms) as adapted,
    ):
        names: list[str | None] = [f"adapter {index}" for index in range(batch)]
        for seed, name in enumerate(names):
            adapted.load_lora(str(name), write_adapter(Path(folder) / str(seed), adapted, args.rank, seed))
        none: list[str | None] = [None] * batch
        variants = {
            "no room for adapters": (plain, none),
            "none used": (adapted, none),
            "one used": (adapted, [names[0], *none[1:]]),
            "one each": (adapted, names),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for round_index in range(args.rounds + 1):  # the first warms up
            for name, (engine, loras) in variants.items():
                taken = statistics.median(step_times(engine, batch, args.steps, loras))
                times[name] += [taken] if round_index else []
    base = times["no room for adapters"]
    ratios = {name: [one / other for one, other in zip(each, base, strict=True)] for name, each in times.items()}
    found = {
        name: {
            "median_ms": round(statistics.median(each), 3),
            "ratio": round(statistics.median(ratios[name]), 3),
            "ratios": [round(min(ratios[name]), 3), round(max(ratios[name]), 3)],
        }
        for name, each in times.items()
    }
    about = {"device": device.capabilities.device_name, "torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({**about, **vars(args), "threads": torch.get_num_threads(), "steps_ms": found}, indent=1))


if __name__ == "__main__":
    main()
