"""A report of `core bench` as one HTML page: its facts, figures, plot, and what was checked.

The page holds its style, has no script and loads nothing. All text is escaped by the template engine.
"""

from __future__ import annotations

from importlib.resources import files

from core.bench.cells import BenchReport
from core.bench.plots.figures import title_of
from core.bench.plots.svg import to_svg
from core.bench.text import COLUMNS, facts_of, notes_of, rows_of


def to_html(report: BenchReport) -> str:
    """Return the page."""
    import jinja2
    from markupsafe import Markup

    source = files("core").joinpath("assets", "bench.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(source).render(
        title=title_of(report),
        facts=[(name, text) for name, text in facts_of(report) if text],
        columns=[column.replace("\n", " ") for column in COLUMNS],
        rows=[row for cell in report.cells for row in rows_of(cell, report)],
        notes=list(notes_of(report)),
        plot=Markup(to_svg(report)),
    )
