"""Lines of a plan: names of modules or parameters, in which `*` stands for a number."""

from __future__ import annotations

import re


def line_of(name: str) -> str:
    """Return the line that means a name and those that differ from it in numbers alone."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def pattern(line: str) -> re.Pattern[str]:
    """Return what the names that a line of a plan means match."""
    return re.compile(re.escape(line).replace(r"\*", r"\d+"))
