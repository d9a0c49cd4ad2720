"""`core conformance`: run the suite on a device and report which level it has reached."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import typer

from core.cli.model_argument import DEVICE
from core.engine.parallel.interrupts import interrupted_by_sigterm
from core.errors import UsageError
from core_conformance.ranks import DEFAULT_RANKS, MAX_RANKS
from core_conformance.report.write import FORMS

if TYPE_CHECKING:
    from core_conformance.case import CaseInfo
    from core_conformance.report.report import Report
    from core_conformance.runner.session import Options

_STDOUT = Path("-")

_REPORTS = frozenset(FORMS)
_NO_EFFECT: Mapping[str, tuple[frozenset[str], str]] = MappingProxyType(
    {
        "--list": (_REPORTS | {"--from"}, "it lists cases and runs none: there is no report"),
        "--pdb": (frozenset({"--workers", "--timeout-factor"}), "it runs in this process, without deadlines"),
        "--in-process": (frozenset({"--workers", "--timeout-factor"}), "it runs in this process, without deadlines"),
    }
)
"""Option -> options that have no effect beside it, and why. `--from` leaves only the reports' options in effect."""


def conformance(
    context: typer.Context,
    device: str = DEVICE,
    level: int = typer.Option(3, min=0, max=3, help="Highest level to prove: 0 host, 1 ops, 2 graphs, 3 models."),
    case: list[str] = typer.Option([], help="Id or glob of cases to run, such as 'ops/rms_norm/*'; repeatable."),
    provider: list[str] = typer.Option([], help="Only the cases of implementations of this name; repeatable."),
    seed: int = typer.Option(0, help="Seed of every random choice."),
    fuzz: int = typer.Option(0, min=0, help="Examples per op and mode of the fuzzing cases; 0 leaves them out."),
    xfail: Path | None = typer.Option(None, help="Expected failures of the plugin (core.xfail/1, a TOML file)."),
    ranks: int = typer.Option(DEFAULT_RANKS, min=2, max=MAX_RANKS, help="Processes of cases that run in several."),
    workers: int | None = typer.Option(None, min=1, help="Worker processes; default: by the number of cores."),
    threads: int | None = typer.Option(None, min=1, help="Torch threads per worker; default: 1."),
    timeout_factor: float = typer.Option(1.0, min=0.01, help="Multiplies the time that each case may take."),
    fail_fast: bool = typer.Option(False, "--fail-fast", help="Stop at the first failure; proves no level."),
    in_process: bool = typer.Option(False, "--in-process", help="Run in this process: a crash ends the run."),
    pdb: bool = typer.Option(False, "--pdb", help="As --in-process, and stop in the debugger where a case raises."),
    list_cases: bool = typer.Option(False, "--list", help="List the chosen cases instead of running them."),
    json: Path | None = typer.Option(None, help="Write core.conformance/1 to this file; - for standard output."),
    html: Path | None = typer.Option(None, help="Write one self-contained page to this file."),
    junit: Path | None = typer.Option(None, help="Write JUnit XML to this file."),
    badge: Path | None = typer.Option(None, help="Write a badge (SVG) to this file."),
    badge_json: Path | None = typer.Option(None, help="Write the badge's data to this file, as shields.io reads it."),
    source: Path | None = typer.Option(None, "--from", help="Report on an earlier run's JSON instead of running."),
) -> int:
    """Prove a device plugin numerically against eager: exit code 0 where all that was asked for holds."""
    from core_conformance.report.write import check_targets, load, write
    from core_conformance.runner.session import Options, list_chosen

    _check_together(_given(context))
    targets = dict(zip(FORMS, (json, junit, html, badge, badge_json), strict=True))
    check_targets(targets)
    options = Options(
        device=device,
        level=level,
        fuzz=fuzz,
        seed=seed,
        chosen=(*case, *_cases_of(provider)),
        workers=workers,
        threads=threads,
        fail_fast=fail_fast,
        in_process=in_process or pdb,
        xfail=xfail,
        timeout_factor=timeout_factor,
        ranks=ranks,
    )
    if list_cases:
        _print_lines([_line(info) for info in list_chosen(options)])
        return 0
    interrupt = None
    if source is not None:
        report = load(source)
    else:
        with _stdout_kept() if json == _STDOUT else nullcontext():
            report, interrupt = _run(options, pdb=pdb)
    write(report, targets)
    _print(report, [path for path in targets.values() if path not in (None, _STDOUT)], to_stderr=json == _STDOUT)
    if interrupt is not None:
        raise interrupt
    return 0 if proven(report) else 1


def proven(report: Report) -> bool:
    """Return whether the run holds what was asked for: nothing bad, and the level, unless only some cases ran.

    Known failures that a vendor has listed do not fail a run, although they stand in the way of a level.
    """
    from core_conformance.rules.levels import reached

    if not report.passed or report.chosen:
        return report.passed
    excused = [replace(each, status="pass") if each.status == "xfail" else each for each in report.outcomes]
    return reached(excused, level=report.level)[0] == report.level


def _cases_of(providers: Sequence[str]) -> list[str]:
    """Return globs of the cases that judge implementations of these names."""
    if not providers:
        return []
    from core_conformance.cases.ops.collect import slug

    return [f"ops/*/{slug(name)}/*" for name in providers]


def _given(context: typer.Context) -> list[str]:
    """Return the options given on the command line."""
    sources = ((param.opts[0], context.get_parameter_source(param.name or "")) for param in context.command.params)
    # By name: typer has its own copy of click or the installed one, by version.
    return [option for option, source in sources if source is not None and source.name == "COMMANDLINE"]


def _check_together(given: Sequence[str]) -> None:
    """Raise `UsageError` for an option that would be silently ignored."""
    for option in given:
        if option == "--from":
            unused, why = frozenset(given) - _REPORTS - {option}, "it reports on a run that is over, and runs nothing"
        else:
            excluded, why = _NO_EFFECT.get(option, (frozenset[str](), ""))
            unused = excluded & set(given)
        if unused:
            names = ", ".join(sorted(unused))
            raise UsageError(f"{option} with {names}", found=why, remedy=f"leave out {names}, or {option}")


def _line(info: CaseInfo) -> str:
    unsupported = f" [not supported: {info.not_supported}]" if info.not_supported else ""
    return f"{info.id:<56} {info.what}{unsupported}"


def _print_lines(lines: Sequence[str]) -> None:
    """Print to standard output; a reader that has seen enough, such as `head`, ends it."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        # Discard the buffer, since flushing it at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """Send what cases print in this process, from Python or from a C library, to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _run(options: Options, *, pdb: bool) -> tuple[Report, KeyboardInterrupt | None]:
    """Run the suite; return the report, and the interrupt (Ctrl-C or SIGTERM) that ended the run early."""
    from core_conformance.runner.progress import Progress
    from core_conformance.runner.session import Interrupted, run

    with interrupted_by_sigterm(), Progress() as progress:

        def debug(error: BaseException) -> None:
            from pdb import post_mortem

            with progress.paused():
                post_mortem(error.__traceback__)

        try:
            return run(options, progress, on_exception=debug if pdb else None), None
        except Interrupted as interrupted:
            return interrupted.report, interrupted.interrupt


def _print(report: Report, written: Sequence[Path | None], *, to_stderr: bool) -> None:
    from rich.console import Console

    from core.cli.output import console
    from core_conformance.report.terminal import WIDTH, print_report

    narrow = None if sys.stderr.isatty() else WIDTH
    place = Console(stderr=True, highlight=False, width=narrow) if to_stderr else console()
    print_report(report, place)
    for path in written:
        place.print(f"written: {path}", markup=False, soft_wrap=True)
