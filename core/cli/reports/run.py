"""What `core run` prints: the text as it comes, then a table of the run, or all of it as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.compilation.report import counted

if TYPE_CHECKING:
    from rich.console import Console

    from core.cli.reports.timeline import RunTimeline
    from core.compilation.report import ProgramReport, TraceReport
    from core.engine.check.comparison import Comparison
    from core.engine.models.loading import LoadedModel
    from core.engine.parallel.rank import Rank
    from core.engine.serve.engine import Engine
    from core.engine.serve.prompts import Prompt
    from core.engine.serve.request import Completion


def for_model(prompts: Sequence[str], loaded: LoadedModel) -> Sequence[Prompt]:
    """Return the prompts; for a model type, which is built without a tokenizer, their bytes as token ids."""
    if loaded.tokenizer is not None or loaded.tokenizer_error is not None:
        return prompts
    return [[byte % loaded.vocab_size for byte in prompt.encode(errors="surrogateescape")] for prompt in prompts]


def generate(engine: Engine, texts: Sequence[str], params: Any, *, stream: bool) -> list[Completion]:
    """Generate, and with one prompt print its text as it comes; with several, each as a whole at the end.

    Without a tokenizer there is no text, and token ids are printed.
    """

    def write(_: int, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    prompts, has_text = for_model(texts, engine.loaded), engine.loaded.tokenizer is not None
    lora = next(iter(engine.loras), None)
    if stream and has_text and len(texts) == 1:
        write(0, texts[0])
        completions = engine.generate(prompts, params, on_text=write, lora=lora)
        write(0, "\n\n")
        return completions
    completions = engine.generate(prompts, params, lora=lora)
    if stream:
        for index, (text, completion) in enumerate(zip(texts, completions, strict=True)):
            ids = ", ".join(map(str, completion.token_ids))
            print(f"[{index}] {text}{completion.text}\n" if has_text else f"[{index}] token ids: {ids}\n")
    return completions


def _beside(report: ProgramReport) -> str:
    """Say what was compiled beside the steps."""
    interim = counted(sum(report.interim.values()), "steps")
    return f"{report.background_s:.1f} s more, beside the first {interim}, which ran without"


def _rows(engine: Engine, comparison: Comparison | None, rank: Rank, skipped: str) -> list[tuple[str, str]]:
    from core.quantization.report import report_of

    loaded, report, quantized = engine.loaded, engine.report(), report_of(engine.loaded.model)
    modes = ", ".join(f"{phase} {mode}" for phase, mode in report.modes.items())
    made = f"{counted(report.num_traces, 'traces')}, {counted(report.num_captures, 'buckets')}"
    made = f"lowering {report.lowering}; {made}" if report.num_captures else "nothing compiled"
    fault = comparison and comparison.device_fault
    rows = [
        *([("DEVICE FAULT", fault)] if fault else []),
        *(_compared_rows(engine, comparison) if comparison else [("check", f"not run: {skipped}")]),
        ("start", f"{report.time_text(engine.compile_time_s)}; compile cache {report.cache} ({report.counters_text})"),
        *([("compiled", _beside(report))] if report.background_s else []),
        ("device", f"{engine.device.name}: {engine.device.capabilities.device_name}"),
        ("plugin", str(engine.device.plugin)),
        ("chosen", engine.device.reason),
        *([] if rank.size == 1 else [("ranks", ", ".join(filter(None, (str(rank.size), rank.cores))))]),
        ("model", f"{type(loaded.model).__name__}, {loaded.num_parameters / 1e6:.1f} M parameters, {loaded.dtype}"),
        *([] if loaded.weights_read is None else [("read by rank 0", str(loaded.weights_read))]),
        *(("adapter", f"{a.path}: rank {a.rank}, {a.num_layers} layers") for a in engine.loras.values()),
        *([] if quantized is None else [("quantised", quantized.summary())]),
        ("cache", f"{engine.route}: {engine.route_reason}"),
        ("programs", f"{modes}; {made}"),
        *(("note", note) for note in report.notes),
        *(("larger bucket", f"{count} times, {which}") for which, count in report.stand_ins.items()),
        *(("eager", f"{count} times, {reason}") for reason, count in report.fallbacks.items()),
        *((f"passes, {_graph_of(trace, report)}", trace.passes_line()) for trace in report.traces),
    ]
    return rows + (_drafts_rows(engine) if engine.config.speculative else [])


def _graph_of(trace: TraceReport, report: ProgramReport) -> str:
    """Return the phase of a graph, with its guards where the phase has several graphs."""
    alone = sum(each.phase == trace.phase for each in report.traces) == 1
    guards = "" if alone else ", ".join(f"{name}={value}" for name, value in trace.buckets[0].guards)
    return f"{trace.phase} ({guards})" if guards else trace.phase


def _drafts_rows(engine: Engine) -> list[tuple[str, str]]:
    stats, draft, report = engine.stats(), engine.draft, engine.drafter.report()
    drafted, accepted = stats.drafted.total(), stats.accepted.total()
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    rows = [("drafts", f"{accepted} of {counted(drafted, 'drafted tokens')} accepted{share}")]
    if draft is None or report is None:
        return rows
    about = f"{type(draft.model).__name__}, {draft.num_parameters / 1e6:.1f} M parameters, {draft.dtype}"
    return [("draft model", about), ("its compile cache", f"{report.cache} ({report.counters_text})"), *rows]


def _compared_rows(engine: Engine, comparison: Comparison) -> list[tuple[str, str]]:
    from core.engine.check.quantized import widens
    from core.quantization.report import report_of

    model, num_captures = engine.loaded.model, engine.report().num_captures
    eager = "eager" if report_of(model) is None else "the quantised model's own eager"
    allowed = "rounding to codes allows" if widens(model, engine.loaded.dtype) else "eager"
    ratio = comparison.compiled_tokens_per_s / comparison.eager_tokens_per_s
    verdict, rounds = comparison.verdict, counted(comparison.rounds, "rounds")
    return [
        ("greedy tokens", _tokens_line(comparison)),
        (
            "max logits error",
            f"{verdict.max_error:.3g} against fp64 ({allowed} {verdict.eager_max_error:.3g}); "
            + ("criterion T1 holds" if verdict.passed else f"criterion T1 FAILS: {verdict.reason}")
            if verdict
            else f"not judged: {comparison.skipped}",
        ),
        *_rounding_row(comparison),
        ("tokens/s, eager", f"{comparison.eager_tokens_per_s:.1f}"),
        (
            "tokens/s, compiled" if num_captures else "tokens/s, engine",
            f"{comparison.compiled_tokens_per_s:.1f} ({ratio:.2f}x {eager}, {rounds} in turns)",
        ),
        *([("slower because", _why_slower(engine))] if ratio < 1 else []),
    ]


def _why_slower(engine: Engine) -> str:
    """Say what of the run explains that it is slower than eager, or how to find out."""
    report, stats = engine.report(), engine.stats()
    off = [phase for phase, mode in report.modes.items() if mode == "off"]
    calls, computed = sum(report.fallbacks.values()), stats.computed + stats.padded
    reasons = [
        f"{' and '.join(off)} ran eagerly inside the engine" if off else "",
        f"{counted(calls, 'calls')} ran eagerly" if calls else "",
        "lowering inline runs op by op, as eager does" if report.lowering == "inline" and report.num_captures else "",
        f"{stats.padded} of {computed} computed tokens were padding" if stats.padded * 2 > computed else "",
    ]
    known = "; ".join(filter(None, reasons))
    return known or "not known from this run: `core bench` measures longer, `core explain --kernels` shows each kernel"


def _rounding_row(comparison: Comparison) -> list[tuple[str, str]]:
    cost = comparison.cache_rounding
    text = f"changes the fp64 logits by {cost:.2g} of their size; eager above rounds its cache too" if cost else ""
    return [("cache rounding", text)] if cost is not None else []


def _tokens_line(comparison: Comparison) -> str:
    if comparison.tokens_equal:
        return f"equal to eager ({counted(comparison.num_tokens, 'tokens')})"
    verdict = {True: "a tie within rounding", False: "WRONG", None: "not judged (ask for the reference by --oracle)"}[
        comparison.mismatch_allowed
    ]
    return f"differ from eager: {comparison.mismatch}: {verdict}"


def print_table(out: Console, engine: Engine, comparison: Comparison | None, rank: Rank, skipped: str = "") -> None:
    """Print what a run did, cost and compared, one line each; skipped: why nothing was compared."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _all_rows(engine, comparison, rank, skipped):
        table.add_row(name, value)
    out.print(table)


def write_page(
    path: Path, engine: Engine, comparison: Comparison | None, rank: Rank, skipped: str, timeline: RunTimeline
) -> None:
    """Write the table of a run, and its timeline, as one HTML page."""
    from core.cli.reports.page import to_html

    title = f"{type(engine.loaded.model).__name__} on {engine.device.name}"
    rows = list(_all_rows(engine, comparison, rank, skipped))
    path.write_text(to_html(title, rows, timeline), encoding="utf-8")


def _all_rows(engine: Engine, comparison: Comparison | None, rank: Rank, skipped: str) -> Iterator[tuple[str, str]]:
    yield from _rows(engine, comparison, rank, skipped)
    for warning in (*engine.loaded.warnings, *(engine.draft.warnings if engine.draft is not None else ())):
        yield "warning", warning


def json_of(
    engine: Engine, completions: Sequence[Completion], comparison: Comparison | None, rank: Rank
) -> dict[str, Any]:
    """Return the fields of core.run/1 (docs/json.md)."""
    from dataclasses import asdict

    import torch

    from core.host.distributions.isolation import warnings
    from core.quantization.report import report_of

    loaded, quantization = engine.loaded, report_of(engine.loaded.model)
    checked = {} if comparison is None else asdict(comparison)
    fault = checked.pop("device_fault", None)
    return {
        "device_fault": fault,
        "device": {
            "name": engine.device.name,
            "product": engine.device.capabilities.device_name,
            "plugin": engine.device.plugin.distribution,
            "version": engine.device.plugin.version,
            "reason": engine.device.reason,
        },
        "torch": torch.__version__,
        "ranks": {
            "size": rank.size,
            "cores": rank.cores,
            "weights_read": None if loaded.weights_read is None else asdict(loaded.weights_read),
        },
        "model": {
            "class": type(loaded.model).__name__,
            "path": None if loaded.path is None else str(loaded.path),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "num_parameters": loaded.num_parameters,
            "warnings": list(loaded.warnings),
            "adapters": [str(each.path) for each in engine.loras.values()],
        },
        "quantization": None if quantization is None else quantization.to_json(),
        "cache": {"route": engine.route, "reason": engine.route_reason},
        "compile_time_s": engine.compile_time_s,
        "program": engine.report().to_json(),
        "completions": [
            {
                "prompt_token_ids": list(c.prompt_token_ids),
                "token_ids": list(c.token_ids),
                "text": c.text,
                "finish_reason": c.finish_reason,
            }
            for c in completions
        ],
        "check": None if comparison is None else {**checked, "passed": comparison.passed},
        "warnings": warnings(),
    }
