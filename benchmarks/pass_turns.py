"""Measure what a pass gains in decode, in turns: eager, `core` without the pass, `core` with it.

Each round runs every subject once, so that a machine that slows down slows all of them. Figures are medians with the
quarters around them: milliseconds, and ratios of two subjects in the same round.

    python benchmarks/pass_turns.py lift_linear --device cpu --model llama-100m --dtype bfloat16 --batch 1,4,8
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from dataclasses import replace
from typing import Any

import torch

import core
from core.bench.cells import Cell, Record
from core.bench.engines import Engines
from core.bench.model import open_model
from core.bench.rounds import Subject, measure
from core.bench.served import CoreSubject
from core.bench.static import SharedCache, StaticSubject, sharing_copy
from core.device import Device
from core.engine.models.loading import LoadedModel
from core.engine.models.quantizing import Quantize
from core.engine.steps.runner import EngineConfig


def subjects(loaded: LoadedModel, device: Device, cell: Cell, name: str, lowering: str | None) -> list[Subject]:
    """Return eager, and an engine without and with the pass, each on a copy of the model: a pass may join weights,
    which it does only where nobody else holds them."""
    found: list[Subject] = [StaticSubject("eager", SharedCache(sharing_copy(loaded.model), device))]
    plain = core.CompileOptions(lowering=lowering)
    without, with_it = replace(plain, disable_passes=(name,)), replace(plain, enable_passes=(name,))
    for title, options in (("before", without), ("after", with_it)):
        config = EngineConfig(options=options)
        own = replace(loaded, model=copy.deepcopy(loaded.model))
        subject = CoreSubject(Engines(own, device, config, [cell]), keep_logits=False)
        subject.name = title
        found.append(subject)
    return found


def spread(values: list[float]) -> str:
    """Return the median and the quarters around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def figures(cell: Cell, records: list[Record]) -> dict[str, Any]:
    """Return a line: each subject's milliseconds, and ratios of the rounds."""
    failures = {record.subject: record.failure for record in records if record.failure}
    if failures:
        return {"cell": cell.name, **failures}
    ms = {record.subject: record.rounds_ms for record in records}
    ratio = {f"{a} / {b}": spread([x / y for x, y in zip(ms[a], ms[b], strict=True)]) for a, b in PAIRS}
    return {"cell": cell.name, **{name: spread(values) for name, values in ms.items()}, **ratio}


PAIRS = (("eager", "before"), ("eager", "after"), ("before", "after"))


def main() -> None:
    """Measure and print a line of JSON per batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the pass")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="", help="a preset or a config.json; default: the embedded model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", metavar="SCHEME", help="quantise the model first, as int8")
    parser.add_argument("--lowering", help="how graphs become callables; default: the device's")
    parser.add_argument("--batch", default="1,4,8")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    device = core.select_device(options.device)
    scheme = Quantize.of(options.quantize, None)
    loaded = open_model(None, options.model or None, device, options.dtype, quantize=scheme)[0]
    facts = {"device": device.capabilities.device_name, "torch": torch.__version__, "threads": torch.get_num_threads()}
    facts |= {"model": options.model or "embedded", "dtype": str(loaded.dtype), "quantize": options.quantize}
    print(json.dumps(facts), flush=True)
    for batch in map(int, options.batch.split(",")):
        cell = Cell(phase="decode", batch=batch, tokens=options.context, steps=options.steps, rounds=options.rounds)
        measured = subjects(loaded, device, cell, options.name, options.lowering)
        records, _ = measure(measured, cell, device)
        print(json.dumps(figures(cell, records)), flush=True)
        for subject in measured:
            subject.free()


if __name__ == "__main__":
    main()
