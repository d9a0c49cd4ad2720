"""The errors of quantised layers, as the terminal and the page show them: each beside the median of all layers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.quantization.report import LayerReport, QuantizationReport

STANDS_OUT = 3.0
"""How many times the median of all layers an error has to be."""
_MAX_LAYERS = 12
_COLUMNS = {
    "weight_error": ("weight error", "rms of the weight's error over rms of the weight"),
    "output_error": ("output error", "the same of the layer's output, for the inputs of the exact model"),
    "cumulative_error": ("cumulative", "the same with all layers quantised"),
    "divergence": ("KL alone", "how far the layer alone moves the predictions, in nats"),
}
"""Title and meaning of each error, by field of `LayerReport`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One error of one layer. times: the median of this error over all layers; share: of the largest."""

    value: float
    times: float
    share: float

    @property
    def stands_out(self) -> bool:
        """Whether the layer is unlike the others."""
        return self.times >= STANDS_OUT

    def text(self, *, percent: bool) -> str:
        """Return the value, and how many times the median it is where it stands out."""
        shown = f"{self.value:.3%}" if percent else f"{self.value:.2g}"
        return f"{shown} ({self.times:.3g}x)" if self.stands_out else shown


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """The columns that were measured, by field of `LayerReport`, and the cells of each layer in the model's order."""

    columns: tuple[str, ...]
    rows: tuple[tuple[LayerReport, dict[str, Measured | None]], ...]

    @property
    def titles(self) -> tuple[str, ...]:
        """Return the titles of the columns."""
        return tuple(_COLUMNS[name][0] for name in self.columns)

    @property
    def legend(self) -> str:
        """Say what the columns mean, and what is marked."""
        meanings = "; ".join(": ".join(_COLUMNS[name]) for name in self.columns)
        return f"{meanings}. Marked: at least {STANDS_OUT:g} times the median of all layers."

    def worst(self, count: int) -> list[tuple[LayerReport, dict[str, Measured | None]]]:
        """Return the rows in which an error is largest beside the median."""

        def most(row: tuple[LayerReport, dict[str, Measured | None]]) -> float:
            return max((cell.times for cell in row[1].values() if cell is not None), default=0.0)

        return sorted(self.rows, key=most, reverse=True)[:count]


def layer_errors(report: QuantizationReport) -> LayerErrors:
    """Return the errors of a model's layers; without rows where none was measured, as for a checkpoint's codes."""
    found = {name: [getattr(layer, name) for layer in report.layers] for name in _COLUMNS}
    columns = {name: values for name, values in found.items() if any(value is not None for value in values)}
    cells = {name: list(_cells(values)) for name, values in columns.items()}
    rows = [(layer, {name: cells[name][index] for name in cells}) for index, layer in enumerate(report.layers)]
    return LayerErrors(tuple(columns), tuple(rows) if columns else ())


def cell_text(name: str, cell: Measured | None) -> str:
    """Return what stands in the table's cell of a column."""
    return "-" if cell is None else cell.text(percent=name != "divergence")


def renderables(report: QuantizationReport, *, full: bool) -> Iterator[Any]:
    """Yield the table for a rich console. full: all layers in the model's order, else the worst ones, worst first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    errors = layer_errors(report)
    if not errors.rows:
        yield Text(f"errors of quantised layers: not measured, {report.source}", style="dim")
        return
    together = "" if report.divergence is None else f"; all layers together: KL {report.divergence:.2g}"
    yield Text.assemble("\n", ("errors of quantised layers", "bold"), together)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", no_wrap=True)
    for title in ("shape", *errors.titles):
        table.add_column(title, justify="right")
    shown = errors.rows if full else errors.worst(_MAX_LAYERS)
    for layer, cells in shown:
        texts = [
            Text(cell_text(name, cell), style="red" if cell is not None and cell.stands_out else "")
            for name, cell in cells.items()
        ]
        table.add_row(Text(layer.name), "x".join(map(str, layer.shape)), *texts)
    yield table
    if len(shown) < len(errors.rows):
        rest = f"{len(errors.rows) - len(shown)} more layers, each nearer to the median (--full, --json, --html)"
        yield Text(rest, style="dim")
    yield Text(errors.legend, style="dim")


def _cells(values: list[float | None]) -> Iterator[Measured | None]:
    measured = [value for value in values if value is not None]
    median, largest = statistics.median(measured), max(measured)
    for value in values:
        if value is None:
            yield None
        else:
            times = value / median if median > 0 else float("inf") if value > 0 else 1.0
            yield Measured(value, times, value / largest if largest > 0 else 0.0)
