"""Measure what each pass gains: milliseconds of a decode step and of a prompt with the pass and without it.

One engine at a time serves the model, so variants run one after the other; the first is measured again at the end, and
the difference of the two is how far the machine drifted. Weights are random.

    python benchmarks/pass_gains.py --device cuda --preset llama-8b --batch 1,64 --prefill 1024 [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import core
from core.bench.cells import Cell, Record
from core.bench.engines import Engines
from core.bench.model import open_model
from core.bench.presets import PRESETS
from core.bench.served import CoreSubject
from core.device import Device
from core.engine.models.loading import LoadedModel
from core.engine.models.quantizing import Quantize
from core.engine.steps.runner import EngineConfig

ALL = "all passes"


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield what is measured."""
    for batch in sizes(options.batch):
        yield Cell(phase="decode", batch=batch, tokens=options.context, steps=options.steps, rounds=options.rounds)
    for tokens in sizes(options.prefill):
        yield Cell(phase="prefill", batch=1, tokens=tokens, steps=3, rounds=options.rounds)


def sizes(text: str) -> list[int]:
    """Read "1,8" as numbers; nothing as none."""
    return [int(size) for size in text.split(",") if size]


def measure(loaded: LoadedModel, device: Device, cell: Cell, engine: EngineConfig) -> dict[str, Any]:
    """Return the figures of one variant: milliseconds of the engine's step, of the graph alone, and matches by pass."""
    subject, record = CoreSubject(Engines(loaded, device, engine, [cell]), keep_logits=False), Record(subject="core")
    try:
        subject.open(cell, record)
        for _ in range(cell.rounds):
            for into, run in ((record.rounds_ms, subject.run), (record.replay_ms, subject.replay)):
                device.synchronize()
                start = time.perf_counter()
                run(cell.steps)
                device.synchronize()
                into.append((time.perf_counter() - start) / cell.steps * 1e3)
        assert subject._engine is not None
        traces = subject._engine.report().traces
        matched = {p.name: p.matched for trace in traces if trace.phase == cell.phase for p in trace.passes}
    finally:
        subject.free()
        gc.collect()
        device.parts.empty_cache()
    return {
        "cell": cell.name,
        "step_ms": round(statistics.median(record.rounds_ms), 4),
        "replay_ms": round(statistics.median(record.replay_ms), 4),
        "matched": matched,
    }


def variants(matched: Mapping[str, int], named: list[str]) -> dict[str, core.CompileOptions]:
    """Return the options of a compile by variant: without each pass that matched, and without any."""
    passes = named or [name for name, count in matched.items() if count]
    return {
        **{f"without {name}": core.CompileOptions(disable_passes=(name,)) for name in passes},
        "no passes": core.CompileOptions(passes=()),
        f"{ALL}, again": core.CompileOptions(),
    }


def main() -> None:
    """Measure and print a line per cell and variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", default="llama-8b", choices=sorted(PRESETS))
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", default="1024")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", default="", help="names; default: those that match")
    parser.add_argument("--quantize", help="a scheme, as for `core bench`")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as for `core bench`")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = core.select_device(options.device)
    loaded, _ = open_model(None, options.preset, device, "auto", Quantize.of(options.quantize, None))
    base = EngineConfig(kv_cache_dtype=options.kv_cache_dtype)
    lines = []
    for cell in cells(options):
        first = measure(loaded, device, cell, base)
        named = [name for name in options.passes.split(",") if name]
        for name, varied in {ALL: None, **variants(first["matched"], named)}.items():
            found = first if varied is None else measure(loaded, device, cell, replace(base, options=varied))
            lines.append({"variant": name, **found, "gain_ms": round(found["replay_ms"] - first["replay_ms"], 4)})
            print(json.dumps({k: v for k, v in lines[-1].items() if k != "matched"}), flush=True)
    if options.json is not None:
        facts = {"preset": options.preset, "device": device.capabilities.device_name, "context": options.context}
        facts |= {"quantize": options.quantize, "kv_cache_dtype": options.kv_cache_dtype}
        options.json.write_text(json.dumps({**facts, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
