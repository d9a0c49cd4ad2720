"""Writes the plot to a file: SVG by svg.py, or PNG by matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path

from core.bench.cells import BenchReport
from core.bench.plots.figures import colours_of, ms_text, panels, subtitle_of, title_of
from core.bench.plots.svg import to_svg
from core.errors import UsageError

SUFFIXES = (".svg", ".png")


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
        path.write_text(to_svg(report), encoding="utf-8")
    else:
        _write_png(report, path)


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
        place, ticks, labelled = 0.0, [], set[str]()
        for group in panel.groups:
            first = place
            for bar in group.bars:
                if bar.ms is not None:
                    label = None if bar.name in labelled else bar.name
                    labelled.add(bar.name)
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
