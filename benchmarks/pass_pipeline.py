"""Measure what the common passes cost on the graph of a Llama of 8B shape, pass by pass, on one core.

The model lives on the meta device: its graph is that of the real one, and no weight takes memory. Tracing and turning
the graph into ATen ops are timed beside the passes and are not part of their sum. Every round runs all passes over a
fresh copy of the graph; figures are medians over rounds, with the lowest and the highest.

    python benchmarks/pass_pipeline.py [--phase decode] [--layers 32] [--rounds 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from core.common.passes.standard import COMMON_PASSES
from core.compilation.rewrite.aten import to_aten
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewriting import bound_constants
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace

BUDGET_MS, PASS_BUDGET_MS = 1000.0, 100.0


def llama(num_layers: int) -> Any:
    """Return a Llama 3 of 8B shape in bf16 on the meta device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def traced(model: Any, phase: str) -> TracedGraph:
    """Trace one phase of the model on transformers' static cache, prefill at any number of tokens."""
    from core.engine.static.cache import static_cache

    cache = static_cache(model, 256)
    num_tokens = 1 if phase == "decode" else 128

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache).logits
        return logits

    with torch.device("meta"):
        inputs = {name: torch.zeros(1, num_tokens, dtype=torch.int64) for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            forward(**inputs)  # the cache allocates here, on first use
        return trace(forward, inputs, dynamic={} if phase == "decode" else dict.fromkeys(inputs, (1,)))


def run_once(traced: TracedGraph) -> tuple[float, tuple[PassReport, ...], fx.GraphModule]:
    """Run all passes over a copy; return the wall time in ms, the reports, and the copy."""
    copy = replace(traced, module=Snapshot(traced.module).module())
    manager = PassManager(COMMON_PASSES, strict=True)
    start = time.perf_counter()
    reports = manager.run(copy.module, constants=bound_constants(copy))
    return (time.perf_counter() - start) * 1e3, reports, copy.module


def measure(phase: str, num_layers: int, rounds: int) -> dict[str, Any]:
    """Return all figures of one phase."""
    graph = traced(llama(num_layers), phase)
    run_once(graph)  # the first run imports what passes need
    walls, times = [], dict[str, list[float]]()
    reports: tuple[PassReport, ...] = ()
    for _ in range(rounds):
        wall, reports, copy = run_once(graph)
        walls.append(wall)
        for report in reports:
            times.setdefault(report.name, []).append(report.elapsed_ms)
    start = time.perf_counter()
    aten = to_aten(copy)
    aten_s = time.perf_counter() - start
    return {
        "phase": phase,
        "num_layers": num_layers,
        "num_nodes": {
            "traced": len(graph.module.graph.nodes),
            "rewritten": len(copy.graph.nodes),
            "aten": len(aten.graph.nodes),
        },
        "trace_s": graph.elapsed_s,
        "to_aten_s": aten_s,
        "pipeline_ms": _spread(walls),
        "passes": [{"name": r.name, "matched": r.matched, "ms": _spread(times[r.name])} for r in reports],
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def show(result: dict[str, Any]) -> None:
    """Print the figures as a table."""
    nodes, total = result["num_nodes"], result["pipeline_ms"]
    print(
        f"{result['phase']}, {result['num_layers']} layers: {nodes['traced']} nodes, {nodes['rewritten']} after the "
        f"passes, {nodes['aten']} in ATen ops"
    )
    print(f"  trace {result['trace_s']:.2f} s, to ATen {result['to_aten_s']:.2f} s (not part of the pipeline)")
    for entry in result["passes"]:
        ms = entry["ms"]
        over = f"  OVER {PASS_BUDGET_MS:.0f} ms" if ms["median"] > PASS_BUDGET_MS else ""
        print(
            f"  {entry['name']:32} {entry['matched']:5} matched {ms['median']:8.1f} ms "
            f"({ms['lowest']:.1f} to {ms['highest']:.1f}){over}"
        )
    over = f"  OVER {BUDGET_MS:.0f} ms" if total["median"] > BUDGET_MS else ""
    print(f"  {'pipeline':46} {total['median']:8.1f} ms ({total['lowest']:.1f} to {total['highest']:.1f}){over}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", choices=["decode", "prefill", "both"], default="both")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    phases = ["decode", "prefill"] if options.phase == "both" else [options.phase]
    results = [measure(phase, options.layers, options.rounds) for phase in phases]
    if options.json:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        print(json.dumps({"versions": versions, "results": results}, indent=2))
        return
    print(f"torch {torch.__version__}, python {platform.python_version()}, one thread")
    for result in results:
        show(result)


if __name__ == "__main__":
    main()
