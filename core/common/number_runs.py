"""Numbers in short, for reports: `core explain` names layers so, and ranks the processors that they are pinned to."""

from __future__ import annotations

from collections.abc import Iterable


def runs_text(numbers: Iterable[int]) -> str:
    """Return numbers in order, runs of them as one: "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
