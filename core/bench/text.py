"""A report of `core bench` in words: one table of figures that fits 80 columns, then what was checked, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from core.bench.cells import BenchReport, CellReport, Record
from core.compilation.report import counted

COLUMNS = ("", "ms", "least - most", "graph\nalone", "floor\n/ ms", "against\neager", "start\ns")
"""Heads of the table of figures."""
_STYLES = {"floor": "dim", "figure": "", "core": "bold", "failed": "red", "given": "dim"}

_MOST_NAME = 56
_MOST_KERNELS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the table of figures: a cell's floor, or a subject in that cell."""

    #: One text for each of `COLUMNS`; those at the end may be missing.
    cells: tuple[str, ...]
    #: floor, figure, core, failed or given (another's figure, from `--reference`).
    kind: str


def renderables(report: BenchReport) -> Iterator[Any]:
    """Yield what `rich` prints: what is missing if it was interrupted, facts, the table, checks, notes, kernels, the
    start."""
    from rich.table import Table

    interrupted, model, rates = facts_of(report)
    if interrupted[1]:
        yield f"INTERRUPTED {interrupted[1]}"
    yield from (model[1], ": ".join(rates))
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", vertical="bottom", no_wrap=bool(column))
    for cell in report.cells:
        for row in rows_of(cell, report):
            first, *rest = row.cells
            table.add_row(first if row.kind == "floor" else f"  {first}", *rest, style=_STYLES[row.kind])
    yield table
    yield from notes_of(report)
    for cell in report.cells:
        if cell.kernels is not None:
            yield from _kernels(cell.cell.name, cell.kernels)
    if report.start is not None:
        yield from start_lines(report.start)


def facts_of(report: BenchReport) -> tuple[tuple[str, str], ...]:
    """Return name and text of: what an interrupt left unmeasured ("" without one), the model, the rates."""
    facts, rates = report.facts, report.rates
    reads = "".join(
        f"{rate / 1e9:.1f} GB/s (read, {counted(threads, 'threads')}), " for threads, rate in rates.reads.items()
    )
    return (
        ("interrupted", facts.get("interrupted") or ""),
        (
            "model",
            f"{facts['model']['title']}: {facts['model']['class']}, {facts['model']['num_parameters'] / 1e6:.1f} M "
            f"parameters, {facts['model']['dtype']}; {facts['device']['name']}: {facts['device']['product']}, plugin "
            f"{facts['device']['plugin']} {facts['device']['version']}; torch {facts['versions']['torch']}, "
            f"transformers {facts['versions']['transformers']}",
        ),
        (
            "measured here",
            f"{rates.bytes_per_s / 1e9:.1f} GB/s (copies of {rates.copy_bytes / 2**20:.0f} MiB, read plus written), "
            f"{reads}{rates.flops_per_s / 1e12:.3g} TFLOP/s ({rates.dtype} products of size {rates.matmul_size})",
        ),
    )


def rows_of(report: CellReport, whole: BenchReport) -> Iterator[Row]:
    """Yield the rows of a cell: its floor, its subjects in the order asked for, and what others stated."""
    eager = next((r.median_ms for r in report.records if r.subject == "eager"), None)
    floor = report.floor
    what = "bytes" if floor.bytes_ms >= floor.flops_ms else "flops"
    yield Row(cells=(report.cell.name, ms(floor.ms), f"floor ({what})"), kind="floor")
    for record in report.records:
        median = record.median_ms
        if record.failure or median is None:
            cells: tuple[str, ...] = (record.subject, "-", "FAILED" if record.failure else "not measured")
            yield Row(cells=cells, kind="failed")
            continue
        graph = sorted(record.replay_ms)
        cells = (
            record.subject,
            ms(median),
            f"{ms(min(record.rounds_ms))} - {ms(max(record.rounds_ms))}",
            ms(graph[len(graph) // 2]) if graph else "",
            f"{floor.ms / median:.0%}",
            f"{eager / median:.2f}x" if eager is not None else "",
            f"{record.start_s:.1f}",
        )
        yield Row(cells=cells, kind="core" if record.subject == "core" else "figure")
    for name, others in whole.references.items():
        if report.cell.name in others:
            median = others[report.cell.name]
            ratio = f"{eager / median:.2f}x" if eager is not None else ""
            yield Row(cells=(name, ms(median), "given", "", f"{floor.ms / median:.0%}", ratio), kind="given")


def notes_of(report: BenchReport) -> Iterator[str]:
    """Yield what stands below the table: checks, those that found something first, notes, and what is missing."""
    yield from _checks(report)
    for cell in report.cells:
        for record in cell.records:
            yield from (f"note, {cell.cell.name}, {record.subject}: {note}" for note in dict.fromkeys(record.notes))
    yield from (f"not measured: {name}: {why}" for name, why in report.facts["settings"]["missing"].items())


def _checks(report: BenchReport) -> Iterator[str]:
    """Yield a line for each failure and difference, equal ones of several cells as one; then what agrees with eager."""
    said: dict[tuple[str, str], list[str]] = {}
    agreed: dict[str, list[tuple[int, bool]]] = {}
    for cell in report.cells:
        for record in cell.records:
            if not record.failure and _agrees(record):
                logits = bool(record.verdict.get("logits"))
                agreed.setdefault(record.subject, []).append((record.verdict["tokens_compared"], logits))
            elif text := f"FAILED: {record.failure}" if record.failure else check_text(record):
                said.setdefault((record.subject, text), []).append(cell.cell.name)
    yield from (f"{subject}, {', '.join(cells)}: {text}" for (subject, text), cells in said.items())
    same: dict[str, list[str]] = {}
    for subject, found in agreed.items():
        held = sum(logits for _, logits in found)
        where = "" if held == len(found) else f" in {counted(held, 'cells')}"
        logits_text = f"; logits hold T1{where}" if held else ""
        text = f"{counted(sum(tokens for tokens, _ in found), 'tokens')} equal in {counted(len(found), 'cells')}"
        same.setdefault(f"{text}{logits_text}", []).append(subject)
    yield from (f"{', '.join(subjects)}: {text}" for text, subjects in same.items())


def _agrees(record: Record) -> bool:
    """Return whether everything that was judged of a subject is as it should be."""
    logits = record.verdict.get("logits")
    judged = bool(record.verdict.get("tokens_equal")) and not record.verdict.get("logits_skipped")
    return judged and (not logits or bool(logits["passed"]))


def check_text(record: Record) -> str:
    """Return in a few words what the comparison with eager says."""
    verdict: Mapping[str, Any] = record.verdict
    if not verdict:
        return ""
    compared = verdict["tokens_compared"]
    tokens = (
        f"{counted(compared, 'tokens')} equal"
        if verdict["tokens_equal"]
        else f"{verdict['tokens_agreeing']} of {counted(compared, 'tokens')} equal ({verdict['differences']})"
        if "differences" in verdict
        else f"TOKENS DIFFER ({verdict['mismatch']})"
    )
    logits = verdict.get("logits")
    if logits:
        return f"{tokens}; logits {'hold T1' if logits['passed'] else 'BREAK T1: ' + logits['reason']}"
    skipped = verdict.get("logits_skipped")
    return f"{tokens}; logits not judged: {skipped}" if skipped else tokens


def ms(value: float) -> str:
    """Write milliseconds with three digits at least."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _kernels(name: str, kernels: Mapping[str, Any]) -> Iterator[Any]:

    yield f"\nkernels of core, {name}"
    if "error" in kernels:
        yield str(kernels["error"])
    else:
        yield from kernel_tables(kernels)


def start_lines(start: Mapping[str, Any]) -> Iterator[str]:
    """Yield the seconds from the start of a process to its first token, by phase."""
    yield "\nfrom process start to the first token"
    for kind in ("cold", "warm"):
        phases: Mapping[str, float] = start[kind]["phases"]
        each = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        more = (
            f"; {seconds:.2f} s more of compiling beside its steps" if (seconds := start[kind]["background_s"]) else ""
        )
        made = start[kind]["kernels"]
        kernels = f"{made['compiled']} kernels compiled, {made['ahead']} of them ahead of the first run"
        told = f"{start[kind]['total_s']:.2f} s ({each}); {kernels}"
        yield f"  {kind}: {told}; compile cache: {start[kind]['cache']}{more}"


def kernel_tables(profile: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what `rich` prints of a profile's JSON: a line of totals, one layer of each kind, the rest."""
    from rich.table import Table
    from rich.text import Text

    of = f"batch {profile['batch']}, context" if profile["phase"] == "decode" else "prompt of"
    yield (
        f"{profile['phase']}, {of} {profile['tokens']}: {profile['num_kernels']} {profile['source']}, "
        f"{profile['total_us']:.1f} us together (not captured, one by one), floor {profile['floor_us']:.1f} us "
        f"at {profile['bytes_per_s'] / 1e9:.0f} GB/s"
    )
    yield from (f"note: {note}" for note in profile["notes"])
    for layer in profile["layers"]:
        table = Table(box=None, pad_edge=False, title_justify="left")
        times = f" (x{layer['count']})" if layer["count"] > 1 else ""
        table.title = Text(f"\n{layer['name']}{times}: {layer['us']:.1f} us each, {layer['share']:.0%} of the step")
        for column in ("place", "op", "becomes", "kernels", "us", "share", "MB", "floor us", "at floor"):
            is_text = column in ("place", "op", "becomes", "kernels")
            table.add_column(column, justify="left" if is_text else "right", overflow="fold" if is_text else "ellipsis")
        for row in layer["nodes"]:
            ordered = sorted(row["kernels"], key=lambda each: -each["us"])
            kernels = ", ".join(_kernel(kernel) for kernel in ordered[:_MOST_KERNELS])
            kernels += f" and {len(ordered) - _MOST_KERNELS} more" if len(ordered) > _MOST_KERNELS else ""
            part = row["floor_us"] / row["us"] if row["us"] else 0.0
            cells = (row["path"], row["op"], row["implementation"], kernels)
            numbers = (f"{row['us']:.1f}", f"{row['share']:.1%}", f"{row['bytes'] / 1e6:.2f}")
            table.add_row(*map(Text, cells), *numbers, f"{row['floor_us']:.1f}", f"{part:.0%}")
        yield table


def _kernel(kernel: Mapping[str, Any]) -> str:
    name = str(kernel["name"]).removeprefix("void ")
    name = name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"
    return name if kernel["count"] == 1 else f"{kernel['count']} x {name}"
