"""`core run`: generate text with a model on a device, and show in the same run what it cost and whether it is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from core.cli.model_argument import CALIBRATION, DTYPE, KV_CACHE_DTYPE, QUANTIZE, check_options, parse_modes
from core.cli.pass_options import NO_PASS, NO_PASSES, ONLY_PASS, WITH_PASS, pass_switches
from core.engine.models.resolve import check_choice, parse_dtype

if TYPE_CHECKING:
    from core.compilation.compile import Progress
    from core.compilation.report import ProgramReport
    from core.engine.check.comparison import Comparison
    from core.engine.models.quantizing import Quantize
    from core.engine.serve.engine import Engine
    from core.engine.serve.request import Completion

DEFAULT_PROMPT = "If the argument is"


def run(
    device: str = typer.Option("auto", help="Device name, as `core devices` lists it; auto prefers an accelerator."),
    model: Path | None = typer.Option(None, help="Folder of a transformers causal LM; default: the embedded model."),
    prompt: list[str] = typer.Option([DEFAULT_PROMPT], help="Text to continue; repeat for a batch."),
    max_new_tokens: int = typer.Option(48, help="Tokens to generate per prompt."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    top_k: int = typer.Option(0, help="Keep the k most likely tokens; 0 keeps all."),
    top_p: float = typer.Option(1.0, help="Keep the most likely tokens up to this probability."),
    seed: int | None = typer.Option(None, help="Seed of the sampling."),
    stop: list[str] = typer.Option([], help="Text that ends the generation; repeatable."),
    dtype: str = DTYPE,
    mode: str | None = typer.Option(
        None, help="Capture mode (full, piecewise, segmented, compile, off), or one per phase: decode=full,prefill=off."
    ),
    quantize: str | None = QUANTIZE,
    calibration: Path | None = CALIBRATION,
    kv_cache_dtype: str = KV_CACHE_DTYPE,
    speculative: int = typer.Option(0, help="Tokens drafted at most per step from what the text said before."),
    lowering: str | None = typer.Option(None, help="How graphs become callables, for example inline or inductor."),
    with_pass: list[str] = WITH_PASS,
    only_pass: list[str] = ONLY_PASS,
    no_pass: list[str] = NO_PASS,
    no_passes: bool = NO_PASSES,
    strict: bool = typer.Option(False, "--strict", help="Fail on a pass that fails or matches less than it owes."),
    verify: str = typer.Option("off", help="Judge every pass against an fp64 run: off, sample or full."),
    check: bool = typer.Option(True, help="Compare speed, tokens and logits with the eager model."),
    cache: bool = typer.Option(True, help="Keep compiled programs on disk and start from there (docs/cache.md)."),
    oracle: bool | None = typer.Option(None, help="Compute the fp64 reference; default: for models small enough."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead (docs/json.md)."),
) -> int:
    """Generate text with any transformers causal LM on one device, and check it against eager."""
    from core.engine.config import SamplingParams
    from core.engine.models.quantizing import Quantize
    from core.engine.steps.runner import KV_CACHE_DTYPES

    check_choice("--kv-cache-dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop)
    )
    switches = pass_switches(with_pass, only_pass, no_pass, no_passes)
    options = {
        "mode": parse_modes(mode),
        "speculative": speculative,
        "kv_cache_dtype": kv_cache_dtype,
        "lowering": lowering,
        "passes": switches.only,
        "disable_passes": switches.disable,
        "enable_passes": switches.enable,
        "strict": strict,
        "verify": verify,
        "cache": cache,
    }
    scheme = Quantize.of(quantize, calibration)
    check_options(options)
    with _progress(quiet=as_json) as progress:
        engine = _engine(device, model, prompt, params, dtype, options, scheme, progress)
    with engine:
        completions = _generate(engine, prompt, params, stream=not as_json)
        comparison = _compare(engine, completions, oracle) if check else None
        if as_json:
            _print_json(engine, completions, comparison)
        else:
            _print_table(engine, comparison)
    return 0 if comparison is None or comparison.passed else 1


def _engine(
    device: str,
    model: Path | None,
    prompts: Sequence[str],
    params: Any,
    dtype: str,
    options: dict[str, Any],
    scheme: Quantize | None,
    progress: Progress,
) -> Engine:
    """Load model and device, and compile for just these prompts: one bucket for prefill, one for decode."""
    from core.compilation.cache.store import Store
    from core.compilation.rewrite.switches import PassSwitches
    from core.compilation.rewriting import device_passes
    from core.engine.models.assets import embedded_model
    from core.engine.models.loading import load_model
    from core.engine.serve.engine import Engine
    from core.engine.serve.prompts import encode_prompts
    from core.engine.steps.runner import EngineConfig
    from core.host.selection import select_device
    from core.settings import Settings

    if options["cache"] and Settings.from_environment().cache:
        Store.of_user().keep_kernels()  # before a plugin loads a compiler, which reads this once
    resolved = select_device(device)
    switches = PassSwitches(only=options["passes"], disable=options["disable_passes"], enable=options["enable_passes"])
    switches.select(device_passes(resolved))  # a misspelt name is refused before the model is loaded
    check_options(options, resolved)
    kind = parse_dtype(dtype, resolved)
    loaded = load_model(model or embedded_model(), torch_device=resolved.torch_device, dtype=kind, progress=progress)
    loaded = loaded if scheme is None else scheme.apply(loaded, progress)
    encoded = encode_prompts(prompts, loaded, [params] * len(prompts))
    num_tokens = sum(len(e.token_ids) for e in encoded)
    longest = max(len(e.token_ids) + e.max_new_tokens for e in encoded)
    config = EngineConfig(
        max_num_seqs=len(prompts),
        max_model_len=min(loaded.max_position or longest, -(-longest // 64) * 64),
        decode_buckets=(len(prompts),),
        prefill_buckets=(max(32, 1 << (num_tokens - 1).bit_length()),),
        # The check generates greedily whatever was asked for, so that is captured in any case.
        sampling=("greedy",) if params.greedy else ("greedy", "random"),
        **options,
    )
    return Engine(loaded, resolved, config, progress=progress)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress]:
    """Show a bar for loading and capture on standard error, where it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            # "capture decode[8, 8]" and "capture prefill[…]" are steps of one bar.
            stage = what.split(" ")[0]
            if stage not in tasks:
                tasks[stage] = bar.add_task(what, total=total)
            bar.update(tasks[stage], description=what, completed=done, total=total)

        yield progress


def _generate(engine: Engine, prompts: Sequence[str], params: Any, *, stream: bool) -> list[Completion]:
    """Generate, and with one prompt print its text as it comes; with several, each as a whole at the end."""
    import sys

    def write(_: int, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    if stream and len(prompts) == 1:
        write(0, prompts[0])
        completions = engine.generate(prompts, params, on_text=write)
        write(0, "\n\n")
        return completions
    completions = engine.generate(prompts, params)
    if stream:
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            print(f"[{index}] {prompt}{completion.text}\n")
    return completions


def _compare(engine: Engine, completions: Sequence[Completion], oracle: bool | None) -> Comparison:
    from core.engine.check.comparison import compare

    prompts = [list(c.prompt_token_ids) for c in completions]
    room = engine.max_model_len - max(map(len, prompts))
    return compare(engine, prompts, num_tokens=min(32, room), oracle=oracle)


def _rows(engine: Engine, comparison: Comparison | None) -> list[tuple[str, str]]:
    loaded, report = engine.loaded, engine.report()
    modes = ", ".join(f"{phase} {mode}" for phase, mode in report.modes.items())
    rows = [
        ("device", f"{engine.device.name}: {engine.device.capabilities.device_name}"),
        ("plugin", str(engine.device.plugin)),
        ("chosen", engine.device.reason),
        ("model", f"{type(loaded.model).__name__}, {loaded.num_parameters / 1e6:.1f} M parameters, {loaded.dtype}"),
        *_quantized_row(engine),
        ("cache", f"{engine.route}: {engine.route_reason}"),
        (
            "programs",
            f"{modes}; lowering {report.lowering}; {report.num_traces} traces, {report.num_captures} buckets"
            if report.num_captures
            else f"{modes}; nothing compiled",
        ),
        *(("note", note) for note in report.notes),
        *(("larger bucket", f"{count} times, {which}") for which, count in report.stand_ins.items()),
        *(("eager", f"{count} times, {reason}") for reason, count in report.fallbacks.items()),
        *((f"passes, {trace.phase}", trace.passes_line()) for trace in report.traces),
        ("compile cache", _cache_line(report)),
        ("compile time", f"{engine.compile_time_s:.2f} s"),
    ]
    if engine.config.speculative:
        stats = engine.stats()
        rows.append(("drafts", f"{stats.accepted} of {stats.drafted} drafted tokens accepted"))
    return [*rows, *(_compared_rows(engine, comparison) if comparison else [("check", "not run (--no-check)")])]


def _compared_rows(engine: Engine, comparison: Comparison) -> list[tuple[str, str]]:
    from core.engine.check.quantized import widens
    from core.quantization.report import report_of

    model, num_captures = engine.loaded.model, engine.report().num_captures
    eager = "eager" if report_of(model) is None else "the quantised model's own eager"
    allowed = "rounding to codes allows" if widens(model, engine.loaded.dtype) else "eager"
    ratio = comparison.compiled_tokens_per_s / comparison.eager_tokens_per_s
    verdict = comparison.verdict
    return [
        ("tokens/s, eager", f"{comparison.eager_tokens_per_s:.1f}"),
        (
            "tokens/s, compiled" if num_captures else "tokens/s, engine",
            f"{comparison.compiled_tokens_per_s:.1f} ({ratio:.2f}x {eager}, {comparison.rounds} rounds in turns)",
        ),
        (
            "max logits error",
            f"{verdict.max_error:.3g} against fp64 ({allowed} {verdict.eager_max_error:.3g}); "
            + ("criterion T1 holds" if verdict.passed else f"criterion T1 FAILS: {verdict.reason}")
            if verdict
            else f"not judged: {comparison.skipped}",
        ),
        ("greedy tokens", _tokens_line(comparison)),
        *_rounding_row(comparison),
    ]


def _quantized_row(engine: Engine) -> list[tuple[str, str]]:
    from core.quantization.report import report_of

    report = report_of(engine.loaded.model)
    return [] if report is None else [("quantised", report.summary())]


def _cache_line(report: ProgramReport) -> str:
    counted = ", ".join(f"{count} {name}" for name, count in report.counters.items())
    return f"{report.cache} ({counted})"


def _rounding_row(comparison: Comparison) -> list[tuple[str, str]]:
    cost = comparison.cache_rounding
    text = f"changes the fp64 logits by {cost:.2g} of their size; eager above rounds its cache too" if cost else ""
    return [("cache rounding", text)] if cost is not None else []


def _tokens_line(comparison: Comparison) -> str:
    if comparison.tokens_equal:
        return f"equal to eager ({comparison.num_tokens} tokens)"
    verdict = {True: "a tie within rounding", False: "WRONG", None: "not judged (ask for the reference by --oracle)"}[
        comparison.mismatch_allowed
    ]
    return f"differ from eager: {comparison.mismatch}: {verdict}"


def _print_table(engine: Engine, comparison: Comparison | None) -> None:
    from rich.table import Table

    from core.cli.output import console

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(engine, comparison):
        table.add_row(name, value)
    for warning in engine.loaded.warnings:
        table.add_row("warning", warning)
    console().print(table)


def _print_json(engine: Engine, completions: Sequence[Completion], comparison: Comparison | None) -> None:
    from dataclasses import asdict

    import torch

    from core.cli.output import print_json
    from core.quantization.report import report_of

    loaded, quantization = engine.loaded, report_of(engine.loaded.model)
    print_json(
        "core.run/1",
        device={
            "name": engine.device.name,
            "product": engine.device.capabilities.device_name,
            "plugin": engine.device.plugin.distribution,
            "version": engine.device.plugin.version,
            "reason": engine.device.reason,
        },
        torch=torch.__version__,
        model={
            "class": type(loaded.model).__name__,
            "path": str(loaded.path),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "num_parameters": loaded.num_parameters,
            "warnings": list(loaded.warnings),
        },
        quantization=None if quantization is None else quantization.to_json(),
        cache={"route": engine.route, "reason": engine.route_reason},
        compile_time_s=engine.compile_time_s,
        program=engine.report().to_json(),
        completions=[
            {
                "prompt_token_ids": list(c.prompt_token_ids),
                "token_ids": list(c.token_ids),
                "text": c.text,
                "finish_reason": c.finish_reason,
            }
            for c in completions
        ],
        check=None if comparison is None else {**asdict(comparison), "passed": comparison.passed},
    )
