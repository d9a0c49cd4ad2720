"""`core bench`: transformers eager, torch.compile and `core`, interleaved on the same weights, against the floor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from core.bench.preset_names import check_preset
from core.cli.bench_load import bench_load, check_goes_with
from core.cli.model_argument import (
    CALIBRATION,
    DEVICE,
    DRAFT_MODEL,
    DTYPE,
    KV_CACHE_DTYPE,
    MAX_STEP_TOKENS,
    MEASURE,
    MIXED_STEP_TOKENS,
    MODEL,
    PROVIDER,
    QUANTIZE,
    SPECULATIVE,
    check_model_options,
    compile_options,
)
from core.cli.output import check_file, json_text, print_items, status
from core.cli.pass_options import NO_PASS, NO_PASSES, ONLY_PASS, WITH_PASS, pass_switches
from core.cli.ranks import TP, TP_TIMEOUT, run_on_ranks, tried
from core.cli.values import check_positive, numbers
from core.engine.parallel.interrupts import interrupted_by_sigterm
from core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from core.bench.bench import Settings
    from core.bench.cells import BenchReport
    from core.bench.peers.choosing import Choice
    from core.device import Device
    from core.engine.models.loading import LoadedModel
    from core.engine.parallel.rank import Rank

_STDOUT = Path("-")
_CONTEXT, _PREFILL = 1024, "128,1024,4096"


def bench(
    context_: typer.Context,
    model: str | None = MODEL,
    preset: str | None = typer.Option(
        None,
        metavar="NAME|FILE",
        help="A known shape, e.g. llama-8b, or any model's config.json, with random weights; instead of MODEL.",
    ),
    device: str = DEVICE,
    dtype: str = DTYPE,
    batch: str = typer.Option("1,8,64", help="Batches of decode, comma-separated; empty for none."),
    context: int | None = typer.Option(
        None, help=f"Tokens of each sequence before the first decode step; default: {_CONTEXT}, or what fits."
    ),
    prefill: str | None = typer.Option(
        None, help=f"Lengths of prompts, comma-separated; empty for none; default: of {_PREFILL} what fits."
    ),
    subjects: str | None = typer.Option(
        None, help="What to measure, comma-separated; `peers`: all installed ones; default: everything."
    ),
    peer_python: list[str] = typer.Option(
        [], metavar="NAME=PATH", help="The Python of a peer that needs other packages; may be repeated."
    ),
    apart: bool = typer.Option(
        False, help="Measure peers before the model is made: for one that the device holds only once."
    ),
    rounds: int = typer.Option(5, help="Rounds; in each, every subject runs once."),
    steps: int = typer.Option(32, help="Decode steps of a subject per round; an eighth as many prompts of prefill."),
    mode: str | None = typer.Option(None, help="Capture mode of core, as in `core run`."),
    lowering: str | None = typer.Option(None, help="How core's graphs become callables, as in `core run`."),
    provider: list[str] = PROVIDER,
    measure: bool = MEASURE,
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
    serve: bool = typer.Option(False, "--serve", help="Serve a load of requests instead, by core alone."),
    requests: int = typer.Option(256, help="With --serve: how many."),
    prompt_tokens: str = typer.Option("32:1024", help="With --serve: N, FIRST:LAST or lognormal:MU:SIGMA."),
    output_tokens: str = typer.Option("16:256", help="With --serve: tokens generated for each, written alike."),
    rate: float | None = typer.Option(None, help="With --serve: requests per second; default: all there at once."),
    max_num_seqs: int = typer.Option(64, help="With --serve: sequences at once."),
    max_model_len: int | None = typer.Option(None, help="With --serve: longest context."),
    max_step_tokens: int | None = MAX_STEP_TOKENS,
    mixed_step_tokens: int | None = MIXED_STEP_TOKENS,
    speculative: int = SPECULATIVE,
    draft_model: Path | None = DRAFT_MODEL,
    timeline: Path | None = typer.Option(None, help="With --serve: write what each step took, for Perfetto."),
    json: Path | None = typer.Option(
        None, help="Write core.bench/1 (core.bench_load/1 with --serve) to this file; - for standard output."
    ),
    plot: Path | None = typer.Option(None, help="Draw the figures into this .svg (or .png, by matplotlib)."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write one self-contained HTML page."),
    tp: int | None = TP,
    tp_timeout: float = TP_TIMEOUT,
) -> int:
    """Compare decode and prefill of transformers eager, torch.compile and core, and check that they agree.

    Ctrl-C and SIGTERM end it with what was measured until then. The exit code is 1 after that, and if core's logits
    break the numeric criterion, or nothing could be measured.
    """
    from dataclasses import replace

    from core.host.selection import check_name, select_device

    quantized: Any = {"quantize": quantize, "calibration": calibration}
    check_model_options(model, dtype, kv_cache_dtype=kv_cache_dtype, draft_model=draft_model, **quantized)
    check_preset(preset)
    check_name(device)
    if model is not None and preset is not None:
        raise UsageError(
            f"MODEL {model!r} with --preset {preset!r}", found="these are two models", remedy="leave one of them out"
        )
    tokens, lengths = _CONTEXT if context is None else context, _PREFILL if prefill is None else prefill
    for option, value in (("--context", tokens), ("--rounds", rounds), ("--steps", steps)):
        check_positive(option, (value,))
    batches, prompts = (check_positive(o, numbers(o, t)) for o, t in (("--batch", batch), ("--prefill", lengths)))
    for option, path in (("--json", json), ("--plot", plot), ("--html", html)):
        check_file(option, path)
    switches = pass_switches(with_pass, only_pass, no_pass, no_passes)
    options = compile_options(mode, lowering, switches, strict=strict, provider=provider, measure=measure)
    from core.bench.bench import Settings, failed, read_references
    from core.bench.fitting import fitted, positions_of
    from core.bench.load import load_of
    from core.bench.model import engine_options
    from core.bench.peers.choosing import choose
    from core.bench.plots.file import check_plot, write_plot
    from core.bench.plots.page import to_html
    from core.engine.parallel.rank import open_device
    from core.engine.steps.runner import EngineConfig

    drafts: dict[str, Any] = {"speculative": speculative, "draft_model": draft_model}
    engine = EngineConfig(kv_cache_dtype=kv_cache_dtype, options=options, **drafts)
    check_goes_with(context_, serve)
    if (code := run_on_ranks(tp, tp_timeout, device=device, draft_model=draft_model)) is not None:
        return code
    if serve:
        load = load_of(requests, prompt_tokens, output_tokens, rate)
        for option, path in (("--json", json), ("--timeline", timeline)):
            check_file(option, path)
        engine.check_device(select_device(device))
        engine = replace(engine, max_num_seqs=max_num_seqs, max_model_len=max_model_len, sampling=("greedy",))
        config = replace(engine, max_step_tokens=max_step_tokens, mixed_step_tokens=mixed_step_tokens)
        asked = _asked(device, model, preset, dtype, quantize, calibration, engine_options(engine))
        asked["options"] |= {
            "speculative": speculative,
            "draft_model": None if draft_model is None else str(draft_model),
        }
        return bench_load(asked, load, config, timeline=timeline, json=json, tp_timeout=tp_timeout)
    settings = Settings(
        batches=batches,
        context=tokens,
        prompts=prompts,
        rounds=rounds,
        steps=steps,
        engine=engine,
        profile=profile,
    )
    check_plot(plot)
    references = read_references(reference) if reference is not None else {}
    num_positions = positions_of(model, preset)
    settings = fitted(settings, num_positions, context=context is None, prompts=prefill is None)
    settings.check_length(num_positions)  # refused before minutes of work
    resolved, rank = open_device(device, timeout_s=tp_timeout)
    engine.check_device(resolved)
    names = None if subjects is None else tuple(name.strip() for name in subjects.split(",") if name.strip())
    choice = choose(resolved, names, _pythons(peer_python))
    if rank.size > 1:
        if start:
            raise UsageError("--start on several ranks", found="it times one process", remedy="leave --start out")
        choice = choice.without_peers("peers run in one process, and core on several ranks")
        settings = replace(settings, engine=replace(engine, options=replace(options, measure=False)))
    asked = _asked(resolved.name, model, preset, dtype, quantize, calibration, engine_options(engine))
    with interrupted_by_sigterm(), status("loading the model", quiet=json == _STDOUT) as say:
        report = _bench((resolved, rank), asked, settings, choice, references, start, apart, say)
    if not rank.leads:
        return 0
    if json is not None:
        _write_json(report, json, plot=plot, html=html)
    if plot is not None:
        write_plot(report, plot)
    if html is not None:
        html.write_text(to_html(report), encoding="utf-8")
    if json != _STDOUT:
        _print(report, [path for path in (json, plot, html) if path is not None])
    return 1 if failed(report) else 0


def _asked(
    device: str,
    model: str | None,
    preset: str | None,
    dtype: str,
    quantize: str | None,
    calibration: Path | None,
    options: Any,
) -> dict[str, Any]:
    path = None if calibration is None else str(calibration)
    asked = {"device": device, "model": model, "preset": preset, "dtype": dtype, "options": options}
    return asked | {"quantize": quantize, "calibration": path}


def _bench(
    place: tuple[Device, Rank],
    asked: dict[str, Any],
    settings: Settings,
    choice: Choice,
    references: Any,
    start: bool,
    apart: bool,
    say: Callable[[str], None],
) -> BenchReport:
    from dataclasses import replace

    from core.bench.bench import bench
    from core.bench.model import asked_quantize, open_model, random_config
    from core.bench.peers.run import Peers
    from core.bench.start import measure_start
    from core.engine.parallel.rank import note_phase

    def progress(cell: str, done: int, total: int) -> None:
        say(f"{cell} ({done} of {total} cells done)")

    started = None
    if start:  # before this process takes the device's memory
        say("timing the start of a process")
        prompt = settings.prompts[0] if settings.prompts else 32
        started = measure_start({**asked, "prompt": prompt})
    device, rank = place
    note_phase("load")
    quantize, subjects, measured = asked_quantize(asked), dict[str, Any](), None
    with Peers(choice, settings.cells, asked["quantize"] or "") as peers:
        if apart:
            measured = peers.apart(*random_config(asked, device), device, progress)

        def before_quantising(loaded: LoadedModel) -> LoadedModel:
            """Have peers read what the model is now, and try the cut of one that several ranks share."""
            subjects.update(peers.of(loaded, random=asked["preset"] is not None))
            return tried(loaded, rank)

        how = (asked["model"], asked["preset"], device, asked["dtype"], quantize)
        loaded, title = open_model(*how, sharded=rank.size > 1, seen=before_quantising)
        note_phase("serve")
        chosen = peers.choice
        settings = replace(settings, subjects=chosen.subjects, peers=tuple(subjects))
        settings = replace(settings, missing={**settings.missing, **chosen.missing})
        more: dict[str, Any] = {"progress": progress, "peers": subjects, "apart": measured}
        report = bench(loaded, device, settings, title=title, references=references, **more)
    return replace(report, start=started)


def _pythons(asked: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in asked:
        name, sign, path = each.partition("=")
        if not (name and sign and path):
            raise UsageError(
                f"--peer-python {each!r}", found="it is no NAME=PATH", remedy="write --peer-python NAME=/path/to/python"
            )
        found[name] = path
    return found


def _write_json(report: BenchReport, path: Path, **written: Path | None) -> None:
    names = {name: None if file is None else str(file) for name, file in written.items()}
    text = json_text("core.bench/1", **report.to_json(), **names)
    if path == _STDOUT:
        sys.stdout.write(f"{text}\n")
    else:
        path.write_text(f"{text}\n", encoding="utf-8")


def _print(report: BenchReport, written: list[Path]) -> None:
    from core.bench.text import renderables

    print_items([*renderables(report), *(f"written: {path}" for path in written)])
