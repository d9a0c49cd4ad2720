"""Decides what the plot of a bench shows: grouped bars by cell, with the floor of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.bench.cells import BenchReport, CellReport

COLOURS = {
    "eager": "#8f8f8f",
    "compile": "#7ab6d9",
    "reduce-overhead": "#3a7fb5",
    "max-autotune": "#9467bd",
    "core": "#e1701a",
}
"""Colours of the subjects, readable on white and on black. Reference figures take `_OTHERS` in turn."""
_OTHERS = ("#3f9b5c", "#c4a000", "#b0578d", "#5c8a8a")
_LOG_FROM = 12.0  # largest over smallest figure: above, small bars would vanish on a linear axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One figure."""

    name: str
    #: None for a subject that failed.
    ms: float | None
    #: Lower end of its spread; equal to `ms` where there is none.
    least: float = 0.0
    #: Upper end of its spread.
    most: float = 0.0
    #: Milliseconds of the captured graph alone.
    graph: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The bars of one cell."""

    label: str
    bars: tuple[Bar, ...]
    floor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One phase."""

    title: str
    groups: tuple[Group, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all bars, each once."""
        return tuple(dict.fromkeys(bar.name for group in self.groups for bar in group.bars))

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest figure, floors and spreads included."""
        bars = [bar for group in self.groups for bar in group.bars if bar.ms is not None]
        values = [group.floor for group in self.groups]
        values += [value for bar in bars for value in (bar.least, bar.most)]
        return min(values), max(values)

    @property
    def is_log(self) -> bool:
        """Whether the figures differ so much that the axis has to be logarithmic."""
        least, most = self.ends
        return most / least > _LOG_FROM


def panels(report: BenchReport) -> list[Panel]:
    """Return what is drawn: a panel for each phase, cells whose subjects all failed left out."""
    found = []
    for phase, title in (
        ("decode", "Decode: ms per step"),
        ("prefill", "Prefill: ms to the first token"),
    ):
        cells = [cell for cell in report.cells if cell.cell.phase == phase]
        groups = tuple(_group(cell, report) for cell in cells)
        groups = tuple(group for group in groups if any(bar.ms is not None for bar in group.bars))
        if groups:
            contexts = f", context {cells[0].cell.tokens}" if phase == "decode" else ""
            found.append(Panel(title=title + contexts, groups=groups))
    return found


def _group(report: CellReport, whole: BenchReport) -> Group:
    cell = report.cell
    bars = []
    for record in report.records:
        replay = sorted(record.replay_ms)
        bars.append(
            Bar(
                name=record.subject,
                ms=record.median_ms,
                least=min(record.rounds_ms, default=0.0),
                most=max(record.rounds_ms, default=0.0),
                graph=replay[len(replay) // 2] if replay else None,
            )
        )
    for name, cells in whole.references.items():
        ms = cells.get(cell.name)
        bars += [Bar(name=name, ms=ms, least=ms, most=ms)] if ms is not None else []
    label = f"batch {cell.batch}" if cell.phase == "decode" else f"{cell.tokens} tokens"
    return Group(label=label, bars=tuple(bars), floor=report.floor.ms)


def title_of(report: BenchReport) -> str:
    """Return the title: the model and the device."""
    facts = report.facts
    return f"{facts['model']['title']}, {facts['model']['dtype']}, on {facts['device']['product']}"


def subtitle_of(report: BenchReport) -> str:
    """Return how it was measured, and what the floor rests on."""
    settings, rates, versions = report.facts["settings"], report.rates, report.facts["versions"]
    return (
        f"medians of {settings['rounds']} interleaved rounds, thin lines: least to most; floor: "
        f"{rates.most_bytes_per_s / 1e9:.0f} GB/s and {rates.flops_per_s / 1e12:.3g} TFLOP/s, measured in this run; "
        f"torch {versions['torch']}"
    )


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each bar."""
    others = [name for name in names if name not in COLOURS]
    return {name: COLOURS.get(name) or _OTHERS[others.index(name) % len(_OTHERS)] for name in names}


def ms_text(value: float) -> str:
    """Write milliseconds with three digits."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
