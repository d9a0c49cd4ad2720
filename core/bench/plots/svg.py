"""The plot as one SVG document that needs nothing else: grouped bars, spreads, the floor of each group.

House-made: bars and lines in the colours of the reader's light or dark theme, for which a plotting library would be a
dozen more packages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from core.bench.cells import BenchReport
from core.bench.plots.figures import Group, Panel, colours_of, ms_text, panels, subtitle_of, title_of

_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.small{font-size:10px}.title{font-size:15px;font-weight:600}"
    ".axis{stroke:#999;fill:none}.grid{stroke:#999;stroke-opacity:.25}.floor{stroke:#c22;stroke-width:2.5}"
    ".spread{stroke:#333;stroke-width:1}.graph{stroke:#333;stroke-width:1.5;stroke-dasharray:3 2}.weak{fill:#777}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.spread,.graph{stroke:#ddd}.weak{fill:#999}.floor{stroke:#f55}}"
)
_LEFT, _RIGHT, _HEIGHT, _FOOT = 62, 18, 250, 52
_BAR, _GAP = 30, 26


def to_svg(report: BenchReport) -> str:
    """Return the plot as one SVG document."""
    drawn = panels(report)
    names = list(dict.fromkeys(name for panel in drawn for name in panel.names))
    colours = colours_of(names)
    width = max([_panel_width(panel) for panel in drawn] + [800])
    legend, top = _legend(names, colours, report, width)
    height = top + len(drawn) * (_HEIGHT + _FOOT + 26) - 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><style>{_STYLE}</style>',
        f'<text class="title" x="{_LEFT}" y="22">{escape(title_of(report))}</text>',
        f'<text class="small weak" x="{_LEFT}" y="39">{escape(subtitle_of(report))}</text>',
        *legend,
    ]
    for panel in drawn:
        parts += _panel(panel, colours, top, width)
        top += _HEIGHT + _FOOT + 26
    return "\n".join([*parts, "</svg>\n"])


def _legend(
    names: Sequence[str], colours: dict[str, str], report: BenchReport, width: float
) -> tuple[list[str], float]:
    """Return the legend, in as many lines as it takes, and where the first panel begins."""
    x, y = float(_LEFT), 58.0
    parts = []
    has_graph = any(record.replay_ms for cell in report.cells for record in cell.records)
    marks = [(name, f'<rect x="{{x}}" y="{{y}}" width="12" height="10" fill="{colours[name]}"/>') for name in names]
    marks.append(("floor", '<line class="floor" x1="{x}" x2="{x2}" y1="{m}" y2="{m}"/>'))
    if has_graph:
        marks.append(("captured graph alone", '<line class="graph" x1="{x}" x2="{x2}" y1="{m}" y2="{m}"/>'))
    for name, mark in marks:
        needed = 24 + 6.6 * len(name) + 12
        if x + needed > width - _RIGHT:
            x, y = float(_LEFT), y + 16
        parts.append(mark.format(x=round(x, 1), y=y - 9, x2=round(x + 12, 1), m=y - 4))
        parts.append(f'<text x="{x + 17:.1f}" y="{y}">{escape(name)}</text>')
        x += needed
    return parts, y + 40


def _panel_width(panel: Panel) -> float:
    return _LEFT + _RIGHT + sum(_GAP + _BAR * len(group.bars) for group in panel.groups) + _GAP


class _Axis:
    """Milliseconds to height, linear from 0 or logarithmic."""

    def __init__(self, panel: Panel, bottom: float) -> None:
        self.least, self.most = panel.ends
        self.log = panel.is_log
        self.bottom = bottom
        if self.log:
            self.low = float(math.floor(math.log10(self.least)))
            self.high = math.log10(self.most) + 0.08 * (math.log10(self.most) - self.low)
        else:
            self.low, self.high = 0.0, self.most * 1.1

    def y(self, ms: float) -> float:
        place = math.log10(ms) if self.log else ms
        return round(self.bottom - (place - self.low) / (self.high - self.low) * _HEIGHT, 1)

    def ticks(self) -> Iterator[tuple[float, str]]:
        if self.log:
            for decade in range(math.floor(self.low), math.ceil(self.high) + 1):
                for value in (1, 2, 5):
                    ms = value * 10.0**decade
                    if self.low <= math.log10(ms) <= self.high:
                        yield self.y(ms), f"{ms:g}"
            return
        step = 10.0 ** math.floor(math.log10(self.high / 7))
        step *= next(factor for factor in (1, 2, 5, 10) if self.high / (step * factor) <= 7)
        for index in range(math.floor(self.high / step) + 1):
            yield self.y(index * step), f"{index * step:g}"


def _panel(panel: Panel, colours: dict[str, str], top: float, width: float) -> Iterator[str]:
    bottom = top + _HEIGHT
    axis = _Axis(panel, bottom)
    scale = " (logarithmic)" if axis.log else ""
    yield f'<text class="title" x="{_LEFT}" y="{top - 8:.1f}">{escape(panel.title + scale)}</text>'
    for y, label in axis.ticks():
        yield f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text class="small" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
    yield f'<path class="axis" d="M{_LEFT} {top}V{bottom}H{width - _RIGHT}"/>'
    x = float(_LEFT + _GAP)
    for group in panel.groups:
        yield from _bars(group, colours, axis, x, bottom)
        x += _GAP + _BAR * len(group.bars)


def _bars(group: Group, colours: dict[str, str], axis: _Axis, left: float, bottom: float) -> Iterator[str]:
    right = left + _BAR * len(group.bars)
    for index, bar in enumerate(group.bars):
        x, middle = left + _BAR * index, left + _BAR * (index + 0.5)
        if bar.ms is None:
            yield (
                f'<text class="small weak" text-anchor="start" transform="translate({middle + 3:.1f} {bottom - 5:.1f}) '
                f'rotate(-90)">{escape(bar.name)}: failed</text>'
            )
            continue
        y = axis.y(bar.ms)
        spread = f"{ms_text(bar.least)} to {ms_text(bar.most)}"
        tip = f"{bar.name}: {ms_text(bar.ms)} ms ({spread}), floor {ms_text(group.floor)}"
        yield (
            f'<rect x="{x + 2:.1f}" y="{y}" width="{_BAR - 4}" height="{max(bottom - y, 0.5):.1f}" '
            f'fill="{colours[bar.name]}"><title>{escape(tip)}</title></rect>'
        )
        if bar.most > bar.least:
            yield (
                f'<line class="spread" x1="{middle:.1f}" x2="{middle:.1f}" y1="{axis.y(bar.least)}" '
                f'y2="{axis.y(bar.most)}"/>'
            )
        if bar.graph is not None:
            at = axis.y(max(bar.graph, 1e-9)) if not axis.log or bar.graph >= 10**axis.low else bottom
            yield f'<line class="graph" x1="{x + 2:.1f}" x2="{x + _BAR - 2:.1f}" y1="{at}" y2="{at}"/>'
        number_at = min(y, axis.y(bar.most)) - 4
        yield f'<text class="small" x="{middle:.1f}" y="{number_at:.1f}" text-anchor="middle">{ms_text(bar.ms)}</text>'
    y = axis.y(group.floor)
    yield (
        f'<line class="floor" x1="{left - 5:.1f}" x2="{right + 5:.1f}" y1="{y}" y2="{y}">'
        f"<title>floor: {ms_text(group.floor)} ms</title></line>"
    )
    middle = (left + right) / 2
    yield f'<text x="{middle:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{escape(group.label)}</text>'
    yield (
        f'<text class="small weak" x="{middle:.1f}" y="{bottom + 32:.1f}" text-anchor="middle">'
        f"floor {ms_text(group.floor)} ms</text>"
    )
