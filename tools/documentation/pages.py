"""Markdown for the pages below docs/ that tools write: by the templates in tools/templates, tables, escaped text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "tools/templates"


def render(template: str, **values: Any) -> str:
    """Return the page that a template makes of these values; a name that the template misses is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown; texts of others go through the filter
    )
    environment.filters["cell"] = cell
    return environment.get_template(template).render(**values)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table, without an end of its last line."""
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join((first, "|---" * (first.count("|") - 1) + "|", *others))


def cell(text: str, limit: int = 400) -> str:
    """Return text fit for a cell of a Markdown table: one line of at most that many characters."""
    line = escaped(" ".join(text.split()))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def escaped(text: str) -> str:
    """Return text with what Markdown's tables, links and HTML take for marks escaped."""
    return text.replace("|", "\\|").replace("](", "]\\(").replace("<", "&lt;")
