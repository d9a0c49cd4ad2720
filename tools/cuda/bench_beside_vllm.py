"""Measure decode of any models beside vLLM: `core bench` for each configuration, whose cells join its document.

    python tools/cuda/bench_beside_vllm.py docs/performance/vllm tools/cuda/shapes/*.json
    python tools/performance_page.py docs/performance

A configuration is a `config.json` of transformers, under any name; weights are random. Where the GPU holds the model
and its cache twice, vLLM and `core` run in turns, else one after the other in the same run; a batch that does not fit
once is named in the document with what it would take. The document is `NAME.json`. A run replaces the cells that it
measures again and keeps the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from core_cuda.peers.room import BESIDE, bytes_per_token, cache_bytes

GIB = 2**30


def memory_bytes() -> int:
    """Return the memory of the first GPU, as its driver says; asking torch would take some of it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def weight_bytes(config: Path) -> int:
    """Return the bytes of the model's weights in a dtype of two bytes, built on no device."""
    import torch
    from transformers import AutoModelForCausalLM

    from core.bench.presets import find_preset

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(find_preset(str(config)).config())
    return 2 * sum(parameter.numel() for parameter in model.parameters())


def planned(needs: Mapping[int, int], total: int) -> tuple[list[int], list[int], dict[int, int]]:
    """Return from the bytes that each batch needs those that fit twice, those that fit once, and the others' bytes."""
    twice = [batch for batch, need in needs.items() if 2 * need <= total]
    once = [batch for batch, need in needs.items() if batch not in twice and need <= total]
    return twice, once, {batch: need for batch, need in needs.items() if need > total}


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a new run with the cells that only an old one has, in the order of their batches."""
    cells = {cell["name"]: cell for cell in (*old.get("cells", ()), *new["cells"])}
    return {**new, "cells": sorted(cells.values(), key=lambda cell: (cell["phase"], cell["batch"], cell["tokens"]))}


def main(
    folder: Path,
    configs: list[Path],
    batches: str = typer.Option("1,8,64,256", help="Of decode, comma-separated."),
    context: int = typer.Option(1024, help="Tokens of each sequence before the first step."),
    rounds: int = typer.Option(5, help="Of each cell."),
    steps: int = typer.Option(16, help="Decode steps of a round."),
    turns: bool = typer.Option(True, help="Take turns where the GPU holds both; else never."),
    peer_python: list[str] = typer.Option([], help="As for core bench."),
    more: str = typer.Option("", help="Further arguments of core bench, separated by spaces."),
) -> None:
    """Measure every configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    total = memory_bytes() - GIB // 2
    failures = []
    for config in configs:
        per_token = bytes_per_token(json.loads(config.read_text(encoding="utf-8")), 2)
        weights, limit = weight_bytes(config), context + 2 + rounds * steps
        needs = {int(each): weights + BESIDE + cache_bytes(per_token, int(each), limit) for each in batches.split(",")}
        twice, once, too_large = planned(needs, total)
        groups = [(twice, False), (once, True)] if turns else [([*twice, *once], True)]
        path = folder / f"{config.stem}.json"
        options = ["--context", str(context), "--rounds", str(rounds), "--steps", str(steps), *more.split()]
        options += [part for each in peer_python for part in ("--peer-python", each)]
        for group, apart in groups:
            missing = measured(path, config, group, [*options, *(["--apart"] if apart else [])]) if group else []
            if missing and not apart:  # what one of them takes is known by measuring alone: perhaps not both fit
                missing = measured(path, config, missing, [*options, "--apart"])
            if missing:
                failures.append(f"{config.stem} at {missing}")
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if document and too_large:
            known = document.setdefault("too_large", {})
            known |= {f"decode/{batch}": round(need / GIB) for batch, need in too_large.items()}
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if failures:
        raise SystemExit(f"not measured: {', '.join(failures)}")


def measured(path: Path, config: Path, batches: Sequence[int], options: Sequence[str]) -> list[int]:
    """Run `core bench` and join its cells with those of `path`; return the batches that one of the two did not run.

    Their cells are not joined.
    """
    with tempfile.TemporaryDirectory() as name:
        out, start = Path(name) / "bench.json", time.perf_counter()
        command = [sys.executable, "-m", "core", "bench", "--preset", str(config), "--device", "cuda"]
        command += ["--batch", ",".join(map(str, batches)), "--prefill", "", "--subjects", "vllm,core"]
        code = subprocess.run([*command, *options, "--json", str(out)], check=False).returncode
        print(f"{config.stem} {batches}: exit code {code}, {time.perf_counter() - start:.0f} s", flush=True)
        if not out.is_file():
            return list(batches)
        document = json.loads(out.read_text(encoding="utf-8"))
    # Cells of several runs stand in one document, so each says when and on what it was measured.
    facts = {name: document[name] for name in ("started", "device", "versions", "rates")}
    whole = [cell for cell in document["cells"] if not any(each["failure"] for each in cell["subjects"])]
    document["cells"] = [{**cell, "run": facts} for cell in whole]
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(merged(old, document), indent=1) + "\n", encoding="utf-8")
    for cell in document["cells"]:
        figures = ((each["subject"], each["ms"]["median"]) for each in cell["subjects"])
        print(cell["name"], f"floor {cell['floor']['ms']:.3f}", *figures, flush=True)
    return sorted(set(batches) - {cell["batch"] for cell in whole})


if __name__ == "__main__":
    typer.run(main)
