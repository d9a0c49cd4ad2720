"""`core bench --serve`: a load of requests, served by one engine, and how long each request waited."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.cli.output import json_text, print_items, status
from core.cli.ranks import tried
from core.compilation.report import counted
from core.errors import UsageError

if TYPE_CHECKING:
    import typer

    from core.bench.load import Load, LoadReport
    from core.engine.steps.runner import EngineConfig

_STDOUT = Path("-")
_LOAD = ("requests", "prompt_tokens", "output_tokens", "rate", "max_num_seqs", "max_model_len")
_SERVED = (*_LOAD, "max_step_tokens", "mixed_step_tokens", "speculative", "draft_model", "timeline")
_NOT_SERVED = (
    "batch",
    "context",
    "prefill",
    "subjects",
    "peer_python",
    "rounds",
    "steps",
    "profile",
    "start",
    "reference",
    "plot",
    "html",
)
_WARM_UP = 8
"""Requests that are served before the load that counts: the first steps of a process are slow."""


def check_goes_with(context: typer.Context, serve: bool) -> None:
    """Raise `UsageError` for an option that says nothing with --serve, or nothing without it."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    stray = [name for name in given if name in (_NOT_SERVED if serve else _SERVED)]
    if stray:
        option = f"--{stray[0].replace('_', '-')}"
        found, remedy = (
            ("it is not for --serve", "leave it out") if serve else ("it is for --serve alone", "add --serve")
        )
        raise UsageError(f"{option} {'with' if serve else 'without'} --serve", found=found, remedy=remedy)


def bench_load(
    asked: dict[str, Any],
    load: Load,
    config: EngineConfig,
    *,
    timeline: Path | None,
    json: Path | None,
    tp_timeout: float,
) -> int:
    """Serve the load and report it; 1 where not all that was asked for was generated."""
    with status("loading the model", quiet=json == _STDOUT) as say:
        served = _serve(asked, load, config, timeline, say, tp_timeout)
    if served is None:
        return 0  # rank 0 reports
    report, wanted, engine = served
    fields = {"device": asked["device"], "model": asked["preset"] or asked["model"], "dtype": asked["dtype"]}
    fields["served_by"] = engine
    if json is not None:
        text = json_text("core.bench_load/1", **fields, options=asked["options"], **report.to_json())
        if json == _STDOUT:
            sys.stdout.write(f"{text}\n")
        else:
            json.write_text(f"{text}\n", encoding="utf-8")
    if json != _STDOUT:
        print_items([_table(report, engine), *(f"written: {path}" for path in (json, timeline) if path is not None)])
    return 0 if report.output_tokens == wanted else 1


def _serve(
    asked: dict[str, Any],
    load: Load,
    config: EngineConfig,
    timeline: Path | None,
    say: Callable[[str], None],
    tp_timeout: float,
) -> tuple[LoadReport, int, dict[str, str]] | None:
    from core.bench.load import run_load, write_timeline
    from core.bench.model import asked_quantize, open_model
    from core.engine.parallel.rank import note_phase, open_device
    from core.engine.serve.leading import FollowingEngine, Orders, make_engine

    device, rank = open_device(asked["device"], timeout_s=tp_timeout)
    note_phase("load")
    how = (asked["model"], asked["preset"], device, asked["dtype"], asked_quantize(asked))
    loaded, _ = open_model(*how, sharded=rank.size > 1, seen=partial(tried, rank=rank))
    say("compiling")
    with make_engine(loaded, device, config, rank) as engine:
        if isinstance(engine, FollowingEngine):
            engine.follow(Orders.of_job())
            return None
        say(f"warming up with {_WARM_UP} requests")
        run_load(engine, replace(load, num_requests=_WARM_UP, rate=None, seed=load.seed + 1))
        say(f"serving {counted(load.num_requests, 'requests')}")
        with engine.timeline() as noted:
            report = run_load(engine, load)
        if timeline is not None:
            write_timeline(noted, timeline)
        requests = load.requests(vocab_size=loaded.vocab_size, max_model_len=engine.max_model_len)
        served_by = {
            "device": device.name,
            "device_name": device.capabilities.device_name,
            "model": type(loaded.model).__name__,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "route": engine.route,
            "ranks": str(rank.size),
        }
        return report, sum(each.max_new_tokens for each in requests), served_by


def _table(report: LoadReport, served_by: dict[str, str]) -> Any:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    counts = report.counts
    table.add_row(
        "served by", "{model}, {dtype}, {route} cache, on {device} ({device_name}), ranks: {ranks}".format(**served_by)
    )
    table.add_row("requests", f"{report.load.num_requests} in {report.seconds:.2f} s")
    table.add_row("tokens", f"{report.prompt_tokens} of prompts, {report.output_tokens} generated")
    if report.cut:
        said = f"{counted(report.cut, 'requests')}, to the context of {counted(report.max_model_len, 'tokens')}"
        table.add_row("shorter than drawn", said)
    table.add_row("generated per second", f"{report.output_rate:.1f}")
    table.add_row("to the first token", _row(report.first_token_s))
    table.add_row("between tokens", _row(report.between_tokens_s))
    table.add_row("steps", ", ".join(f"{count} {phase}" for phase, count in counts["steps"].items()))
    table.add_row(
        "of these begun ahead", f"{counts['ahead']}, {counted(counts['discarded'], 'tokens')} of them in vain"
    )
    table.add_row(
        "padding", f"{_share(counts['padded'], counts['computed'] + counts['padded'])} of all tokens computed"
    )
    table.add_row("prompt tokens reused", str(counts["reused"]))
    table.add_row("preempted", str(counts["preempted"]))
    for kind, drafted in counts["drafted"].items():
        accepted = counts["accepted"].get(kind, 0)
        table.add_row(
            f"drafted by {kind}", f"{counted(drafted, 'tokens')}, {_share(accepted, drafted)} of them accepted"
        )
    if report.fallbacks:
        table.add_row("without a graph", ", ".join(f"{count} {phase}" for phase, count in report.fallbacks.items()))
    return table


def _row(times: dict[int, float]) -> str:
    return ", ".join(f"p{share} {value * 1e3:.1f} ms" for share, value in times.items()) or "none"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"
