"""Count, over every causal language model of transformers, the sites that the passes of the tree lift, and report.

The command is `python tools/sweep_coverage.py --report docs/coverage.md`. Each model type is built tiny, observed in
an eager run, traced and rewritten in a worker process. Results go to a file of JSON lines as they come; a type is run
again when the versions, the passes or the way of counting have changed.

A third of the types is held out: the passes were written without looking at them. They run with `--held-out` only.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from coverage_report import describe, write_report
from coverage_signatures import choose, expectations
from sweeping import Result, Worker, one_line, read_results, sweep

COMMAND = "python tools/sweep_coverage.py --report docs/coverage.md"


def answer(request: Mapping[str, str]) -> Result:
    """Be a worker of the sweep: examine one type, quietly, since a pass that fails is in the results."""
    import logging

    import torch

    logging.getLogger("core").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    return examine(request["type"])


def examine(model_type: str) -> Result:
    """Measure all variants of one type. stage: done, or build where none can be built and run with a static cache."""
    from core.common.passes.standard import COMMON_PASSES
    from lift_coverage.measure import VARIANTS, measure_type

    variants: dict[str, Any] = {}
    reasons: list[str] = []
    for _, group in groupby(VARIANTS, key=lambda variant: (variant.dtype, variant.attention)):
        kept = list(group)
        try:
            for variant, found in measure_type(model_type, COMMON_PASSES, kept):
                variants[variant.name] = facts(found)
        except Exception as error:  # whatever the code of a model raises, in this dtype or with this attention
            reasons.append(one_line(error))
            variants |= {variant.name: {"failed": one_line(error)} for variant in kept}
    if all("failed" in found for found in variants.values()):
        return {"stage": "build", "error": reasons[0], "variants": {}}
    return {"stage": "done", "variants": variants}


def facts(found: Any) -> dict[str, Any]:
    """Return what was measured of one variant as JSON-ready values."""
    from lift_coverage.measure import Untraced

    if isinstance(found, Untraced):
        return {"untraced": one_line(found.error), "num_sites": dict(found.num_sites)}
    values = asdict(found)
    values["judged"]["passed"] = found.judged.passed
    return values


def digest() -> str:
    """Return the identity of the passes and of the way of counting."""
    from core.common.passes.standard import COMMON_PASSES
    from lift_coverage import match, measure, observe, oracle, states, walk

    counting = map(inspect.getsource, (measure, observe, match, oracle, states, walk))
    identities = (declared.uuid() for declared in COMMON_PASSES)
    return hashlib.sha256("\0".join((*counting, *identities)).encode()).hexdigest()


def is_held_out(model_type: str) -> bool:
    """Tell whether a type belongs to the third that no pass was developed on."""
    return int(hashlib.sha256(model_type.encode()).hexdigest(), 16) % 3 == 0


def main(
    types: list[str] = typer.Argument(None, help="Model types; default: all. Held-out ones are left out."),
    results: Path = typer.Option(Path(".cache/coverage.jsonl"), help="Where results are kept, one JSON a line."),
    report: Path | None = typer.Option(None, help="Markdown file to write from all results."),
    held_out: bool = typer.Option(False, help="Run the held-out third too."),
    again: bool = typer.Option(False, help="Run types that have a result for these versions and passes too."),
    signatures: bool = typer.Option(False, help="Run nothing; print types that cover the forms of sites recorded."),
    expected: Path | None = typer.Option(None, help="Write the counts of these types as expectations of the tests."),
    timeout_s: float = typer.Option(300.0, help="Most seconds for one type."),
) -> None:
    """Sweep the causal language model types, or those named."""
    from core.engine.models.tiny import causal_lm_types

    key = {"digest": digest()}
    if not signatures and expected is None:
        wanted = [name for name in types or causal_lm_types() if held_out or not is_held_out(name)]
        sweep(Worker(Path(__file__).stem, timeout_s), wanted, results, key, again=again, describe=describe)
    latest = read_results(results, key)
    developed = [latest[name] for name in sorted(latest) if not is_held_out(name)]
    if report is not None:
        apart = [latest[name] for name in sorted(latest) if is_held_out(name)]
        write_report(report, developed, apart, COMMAND)
    if signatures or expected is not None:
        chosen, left = choose(developed)
        print(*(f"{name} {variant}" for name, variant in chosen), sep="\n")
        print(*(f"not covered: {form}" for form in left), sep="\n")
        if expected is not None:
            expected.write_text(json.dumps(expectations(chosen, latest), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
