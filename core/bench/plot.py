"""The figures as a plot: grouped bars by cell, with the floor of each. What is drawn, and as which file.

SVG is drawn here (svg.py); PNG, which takes pixels, by matplotlib where it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.bench.cells import BenchReport, CellReport
from core.errors import UsageError

SUFFIXES = (".svg", ".png")
COLOURS = {
    "eager": "#8f8f8f",
    "compile": "#7ab6d9",
    "reduce-overhead": "#3a7fb5",
    "max-autotune": "#9467bd",
    "core": "#e1701a",
}
"""Of the subjects; on white and on black alike. Reference figures take `_OTHERS` in turn."""
_OTHERS = ("#3f9b5c", "#c4a000", "#b0578d", "#5c8a8a")
_LOG_FROM = 12.0  # largest over smallest figure: above, small bars would vanish on a linear axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One figure. least, most: its spread, equal to ms where there is none. graph: of the captured graph alone."""

    name: str
    ms: float | None
    least: float = 0.0
    most: float = 0.0
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


def check_plot(path: Path | None) -> None:
    """Refuse, before anything is measured, a file that could not be drawn."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {str(path)!r}", found=f"the formats are {', '.join(SUFFIXES)}", remedy="name a .svg")
    if path.suffix == ".png":
        _pyplot(path)


def write_plot(report: BenchReport, path: Path) -> None:
    """Write the plot; the suffix decides the format."""
    check_plot(path)
    if path.suffix == ".svg":
        from core.bench.svg import to_svg

        path.write_text(to_svg(report), encoding="utf-8")
    else:
        _write_png(report, path)


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
    """Return what was measured, and where."""
    facts = report.facts
    return f"{facts['model']['title']}, {facts['model']['dtype']}, on {facts['device']['product']}"


def subtitle_of(report: BenchReport) -> str:
    """Return how it was measured, and what the floor rests on."""
    settings, rates, versions = report.facts["settings"], report.rates, report.facts["versions"]
    return (
        f"medians of {settings['rounds']} interleaved rounds, thin lines: least to most; floor: "
        f"{rates.bytes_per_s / 1e9:.0f} GB/s and {rates.flops_per_s / 1e12:.3g} TFLOP/s, measured in this run; "
        f"torch {versions['torch']}"
    )


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each bar."""
    others = [name for name in names if name not in COLOURS]
    return {name: COLOURS.get(name) or _OTHERS[others.index(name) % len(_OTHERS)] for name in names}


def ms_text(value: float) -> str:
    """Write milliseconds with three digits."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _pyplot(path: Path) -> object:
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UsageError(
            f"--plot {str(path)!r}",
            found="PNG takes matplotlib, which is not installed",
            remedy="pip install matplotlib, or name a .svg, which needs nothing",
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    return pyplot


def _write_png(report: BenchReport, path: Path) -> None:
    pyplot: object = _pyplot(path)
    drawn = panels(report)
    colours = colours_of(list(dict.fromkeys(name for panel in drawn for name in panel.names)))
    figure, axes = pyplot.subplots(max(len(drawn), 1), 1, figsize=(11, 4.2 * len(drawn) + 1), squeeze=False)  # type: ignore[attr-defined]
    figure.suptitle(f"{title_of(report)}\n{subtitle_of(report)}", fontsize=9)
    for (axis,), panel in zip(axes, drawn, strict=False):
        place, ticks, told = 0.0, [], set[str]()
        for group in panel.groups:
            first = place
            for bar in group.bars:
                if bar.ms is not None:
                    label = None if bar.name in told else bar.name
                    told.add(bar.name)
                    drawn_bar = axis.bar(place, bar.ms, 0.9, color=colours[bar.name], label=label)
                    axis.bar_label(drawn_bar, [ms_text(bar.ms)], fontsize=7)
                place += 1
            axis.hlines(group.floor, first - 0.6, place - 0.4, colors="#c22222", label="floor" if not first else None)
            ticks.append(((first + place - 1) / 2, group.label))
            place += 1
        axis.set_xticks([at for at, _ in ticks], [label for _, label in ticks])
        axis.set_yscale("log" if panel.is_log else "linear")
        axis.set_title(panel.title)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)  # type: ignore[attr-defined]
