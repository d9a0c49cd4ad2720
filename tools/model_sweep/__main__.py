"""Compile transformers' encoder, vision, audio and seq2seq classes, tiny and random, by `torch.compile`, and report.

`python tools/model_sweep --report docs/models.md` writes the page. Each family runs in a worker process that is started
anew after a crash or a time-out. Results go to a file of JSON lines as they come; types that have a line for the
installed versions are not run again unless asked for, so that the sweep may be run in parts (`--family`, `--seconds`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_sweep.families import FAMILIES, classes
from model_sweep.report import describe, page
from sweeping import Worker, read_results, sweep


def main(
    types: list[str] = typer.Argument(None, help="Model types; default: all."),
    family: list[str] = typer.Option(None, help=f"Families; default: all of {', '.join(FAMILIES)}."),
    results: Path = typer.Option(Path(".cache/models.jsonl"), help="Where results are kept, one JSON a line."),
    report: Path | None = typer.Option(None, help="Markdown file to write from all results."),
    again: bool = typer.Option(False, help="Run types that have a result for these versions too."),
    seconds: float = typer.Option(0, help="Begin no further type after so many seconds; 0 for no limit."),
    timeout_s: float = typer.Option(120.0, help="Most seconds for one type."),
) -> None:
    """Sweep the classes, or those named."""
    stop = time.monotonic() + seconds if seconds else None
    for name in family or FAMILIES:
        wanted = [each for each in classes(name) if not types or each in types]
        running = Worker("model_sweep.worker", timeout_s, family=name)
        sweep(running, _until(wanted, stop), results, {"family": name}, again=again, describe=describe)
    if report is not None:
        found = [each for name in FAMILIES for each in read_results(results, {"family": name}).values()]
        report.write_text(page(found, tuple(FAMILIES), sum(map(len, map(classes, FAMILIES)))), encoding="utf-8")


def _until(types: Sequence[str], stop: float | None) -> Iterator[str]:
    for each in types:
        if stop is not None and time.monotonic() > stop:
            return
        yield each


if __name__ == "__main__":
    typer.run(main)
