"""`core bench`: transformers eager, torch.compile and `core`, interleaved on the same weights, against the floor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from core.cli.model_argument import (
    CALIBRATION,
    DEVICE,
    DTYPE,
    KV_CACHE_DTYPE,
    MODEL,
    QUANTIZE,
    check_device,
    compile_options,
)
from core.cli.pass_options import NO_PASS, NO_PASSES, ONLY_PASS, WITH_PASS, pass_switches
from core.engine.models.resolve import check_choice
from core.errors import UsageError

if TYPE_CHECKING:
    from core.bench.bench import Settings, Told
    from core.bench.cells import BenchReport

_STDOUT = Path("-")


def bench(
    model: str | None = MODEL,
    preset: str | None = typer.Option(None, help="A known shape with random weights, e.g. llama-8b; instead of MODEL."),
    device: str = DEVICE,
    dtype: str = DTYPE,
    batch: str = typer.Option("1,8,64", help="Batches of decode, comma-separated; empty for none."),
    context: int = typer.Option(1024, help="Tokens of each sequence before the first decode step."),
    prefill: str = typer.Option("128,1024,4096", help="Lengths of prompts, comma-separated; empty for none."),
    subjects: str = typer.Option(
        "eager,compile,reduce-overhead,max-autotune,core", help="What to measure, comma-separated."
    ),
    rounds: int = typer.Option(5, help="Rounds; in each, every subject runs once."),
    steps: int = typer.Option(32, help="Decode steps of a subject per round; an eighth as many prompts of prefill."),
    mode: str | None = typer.Option(None, help="Capture mode of core, as in `core run`."),
    lowering: str | None = typer.Option(None, help="How core's graphs become callables, as in `core run`."),
    quantize: str | None = QUANTIZE,
    calibration: Path | None = CALIBRATION,
    kv_cache_dtype: str = KV_CACHE_DTYPE,
    with_pass: list[str] = WITH_PASS,
    only_pass: list[str] = ONLY_PASS,
    no_pass: list[str] = NO_PASS,
    no_passes: bool = NO_PASSES,
    strict: bool = typer.Option(False, "--strict", help="Fail on a pass that fails or matches less than it owes."),
    profile: bool = typer.Option(False, "--profile", help="Show the kernels of core's graphs by node too."),
    start: bool = typer.Option(False, "--start", help="Time process start to first token too, cold and warm."),
    reference: Path | None = typer.Option(None, metavar="FILE", help="Others' figures, shown beside: docs/bench.md."),
    json: Path | None = typer.Option(None, help="Write core.bench/1 to this file; - for standard output."),
    plot: Path | None = typer.Option(None, help="Draw the figures into this .svg (or .png, by matplotlib)."),
) -> int:
    """Compare decode and prefill of transformers eager, torch.compile and core, and check that they agree.

    The exit code is 1 if core's logits break the numeric criterion, nothing could be measured, or an interrupt came.
    """
    from core.bench.bench import Settings, failed, read_references
    from core.bench.model import engine_options, find
    from core.bench.plot_file import check_plot, write_plot
    from core.engine.models.quantizing import Quantize
    from core.engine.steps.runner import KV_CACHE_DTYPES, EngineConfig
    from core.host.selection import select_device

    switches = pass_switches(with_pass, only_pass, no_pass, no_passes)
    Quantize.of(quantize, calibration)  # an unknown scheme is refused before minutes of work
    check_choice("--kv-cache-dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    options = compile_options(mode, lowering, switches, strict=strict)
    engine = EngineConfig(kv_cache_dtype=kv_cache_dtype, options=options)
    settings = Settings(
        subjects=tuple(name.strip() for name in subjects.split(",") if name.strip()),
        batches=_numbers("--batch", batch),
        context=context,
        prompts=_numbers("--prefill", prefill),
        rounds=rounds,
        steps=steps,
        engine=engine,
        profile=profile,
    )
    check_plot(plot)
    for option, path in (("--json", json), ("--plot", plot)):
        _check_file(option, path)
    references = read_references(reference) if reference is not None else {}
    chosen = find(model, preset)
    if chosen is not None:  # refused before minutes of work
        settings.check_length(chosen.config().max_position_embeddings)
    resolved = select_device(device)
    check_device(engine, resolved)
    asked = {
        "device": resolved.name,
        "model": model,
        "preset": preset,
        "dtype": dtype,
        "options": engine_options(engine),
    }
    asked |= {"quantize": quantize, "calibration": None if calibration is None else str(calibration)}
    with _status(quiet=json == _STDOUT) as told:
        report = _bench(asked, settings, references, start, told)
    if json is not None:
        _write_json(report, json, plot)
    if plot is not None:
        write_plot(report, plot)
    if json != _STDOUT:
        _print(report, [path for path in (json, plot) if path is not None])
    return 1 if failed(report) else 0


def _bench(asked: dict[str, Any], settings: Settings, references: Any, start: bool, told: Told) -> BenchReport:
    from dataclasses import replace

    from core.bench.bench import bench
    from core.bench.model import asked_quantize, open_model
    from core.bench.start import measure_start
    from core.host.selection import select_device

    started = None
    if start:  # before this process takes the device's memory
        told("start", 0, 1)
        prompt = settings.prompts[0] if settings.prompts else 32
        started = measure_start({**asked, "prompt": prompt})
    device = select_device(asked["device"])
    loaded, title = open_model(asked["model"], asked["preset"], device, asked["dtype"], asked_quantize(asked))
    report = bench(loaded, device, settings, title=title, references=references, told=told)
    return replace(report, start=started)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise UsageError(
            f"{option} {text!r}", found="it is no list of whole numbers", remedy=f"write it like {option} 1,8,64"
        ) from None


def _check_file(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written before minutes of work."""
    if path is not None and path != _STDOUT and (path.is_dir() or not path.absolute().parent.is_dir()):
        found = "it is a folder" if path.is_dir() else f"there is no folder {str(path.absolute().parent)!r}"
        raise UsageError(f"{option} {str(path)!r}", found=found, remedy="name a file in a folder that exists")


@contextmanager
def _status(*, quiet: bool) -> Iterator[Told]:
    """Say on standard error what is being measured, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda cell, done, total: None
        return
    with console.status("loading the model") as status:
        yield lambda cell, done, total: status.update(f"{cell} ({done} of {total} cells done)")


def _write_json(report: BenchReport, path: Path, plot: Path | None) -> None:
    from core.cli.output import json_text

    text = json_text("core.bench/1", **report.to_json(), plot=None if plot is None else str(plot))
    if path == _STDOUT:
        sys.stdout.write(f"{text}\n")
    else:
        path.write_text(f"{text}\n", encoding="utf-8")


def _print(report: BenchReport, written: list[Path]) -> None:
    from core.bench.text import renderables
    from core.cli.output import console

    out = console()
    for item in renderables(report):
        out.print(item, soft_wrap=not hasattr(item, "columns"), markup=False)
    for path in written:
        out.print(f"written: {path}", soft_wrap=True)
