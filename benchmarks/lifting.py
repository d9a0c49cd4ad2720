"""Compare a compiled model with and without the common passes: speed in turns, and what they change in the results.

A Llama with random weights is compiled twice per lowering, once with all common passes and once with none; both run in
turns in one process, so that a busy machine slows both. Ratios count; absolute times only on a quiet machine.

    python benchmarks/lifting.py [--device cpu] [--lowering inline] [--hidden 1024] [--layers 4] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import core
from core.compilation.program import Program
from core.device import Device

PHASES = {"decode": 1, "prefill": 64}


def llama(hidden: int, num_layers: int, dtype: torch.dtype, device: Device) -> Any:
    """Return a Llama with random weights."""
    from transformers import LlamaConfig

    from core.engine.models.loading import build_model

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=int(hidden * 3.5),
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=8192,
        tie_word_embeddings=False,
    )
    return build_model(config, torch_device=device.torch_device, dtype=dtype).model


def compiled(model: Any, device: Device, phase: str, lowering: str | None, passes: tuple[str, ...] | None) -> Program:
    """Compile one phase on a static cache of its own."""
    from core.engine.static.cache import static_cache

    cache = static_cache(model, 256)

    def forward(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache).logits
        return logits

    inputs = example(phase, device)
    with torch.no_grad():
        forward(**inputs)  # the cache allocates here, on first use
    specs = {name: core.InputSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()}
    program = core.compile(forward, device, inputs=specs, lowering=lowering, passes=passes)
    cache.reset()
    return program


def example(phase: str, device: Device) -> dict[str, Tensor]:
    """Return the inputs of a phase for one sequence."""
    num_tokens = PHASES[phase]
    ids = torch.arange(num_tokens, device=device.torch_device)[None]
    return {"input_ids": ids + 3, "position_ids": ids}


def compare(programs: Mapping[str, Program], inputs: dict[str, Tensor], rounds: int, device: Device) -> dict[str, Any]:
    """Run the programs in turns; return the median time of each in ms and how far the results are apart."""
    outputs = {name: program(**inputs).float().clone() for name, program in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    # The static cache fills up with every call; 256 positions less the first call's.
    for _ in range(min(rounds, 256 // max(inputs["input_ids"].shape[1], 1) - 2)):
        for name, program in programs.items():
            device.synchronize()
            start = time.perf_counter()
            program(**inputs)
            device.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    difference = (outputs["all"] - outputs["none"]).abs().max()
    return {
        "ms": medians,
        "speedup": medians["none"] / medians["all"],
        "equal_bits": bool(torch.equal(outputs["all"], outputs["none"])),
        "largest_difference": float(difference / outputs["none"].abs().max()),
        "matched": {p.name: p.matched for p in programs["all"].report().traces[0].passes if p.matched},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lowering", action="append", help="repeatable; default: inline")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="repeatable; default: both")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--without", action="append", default=[], metavar="PASS", help="leave a pass out of `all`")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = core.select_device(options.device)
    results = []
    for dtype in options.dtype or ["float32", "bfloat16"]:
        for lowering in options.lowering or ["inline"]:
            for phase in PHASES:
                names = _names(device, options.without)
                # A model each: merged weights of one must not be seen by the other.
                programs = {
                    label: compiled(
                        llama(options.hidden, options.layers, getattr(torch, dtype), device),
                        device,
                        phase,
                        lowering,
                        passes,
                    )
                    for label, passes in (("all", names), ("none", ()))
                }
                found = compare(programs, example(phase, device), options.rounds, device)
                for program in programs.values():
                    program.close()
                results.append({"dtype": dtype, "lowering": lowering, "phase": phase, **found})
                if not options.json:
                    print(_line(results[-1]), flush=True)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "device": str(device), "results": results}, indent=2))


def _names(device: Device, without: list[str]) -> tuple[str, ...]:
    from core.compilation.rewriting import device_passes

    return tuple(declared.name for declared in device_passes(device) if declared.name not in without)


def _line(result: dict[str, Any]) -> str:
    ms, same = result["ms"], "equal bits" if result["equal_bits"] else f"differ by {result['largest_difference']:.1e}"
    return (
        f"{result['dtype']:9} {result['lowering']:9} {result['phase']:8} none {ms['none']:8.2f} ms, all "
        f"{ms['all']:8.2f} ms: {result['speedup']:.2f}x, {same}; {result['matched']}"
    )


if __name__ == "__main__":
    main()
