"""What `core bisect` prints: the verdict, a table of what was judged, and below it what was not, by the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from core.verify.bisect.report import Bisection, Step

_OUTCOMES = {"nothing": "NOTHING JUDGED", "unjudged": "NOT JUDGED", "fault": "FAULT"}


def print_bisection(out: Console, found: Bisection, not_found: str, facts: Mapping[str, Any]) -> None:
    """Print what was found. not_found: the name of an injected pass that was not found at fault, "" for none."""
    from rich.text import Text

    out.print(found.headline(), style="bold", markup=False, soft_wrap=True)
    if not_found:
        out.print(f"THE INJECTED PASS {not_found!r} WAS NOT FOUND AT FAULT; see its line below", markup=False)
    for fault in found.faults[1:]:
        out.print(f"also: {fault}", markup=False, soft_wrap=True)
    examples = ", ".join(f"{count} of {phase}" for phase, count in facts["examples"].items())
    about = (
        f"{facts['model']}, {facts['dtype']}, on {facts['device']} ({facts['plugin']}); cache {facts['cache']}; "
        f"level {facts['level']}; sets of examples: {examples}"
    )
    out.print(Text(f"\n{about}"))
    for phase in dict.fromkeys(step.phase for step in found.steps):
        steps = [step for step in found.steps if step.phase == phase]
        out.print()
        if judged := [step for step in steps if step.outcome != "skipped"]:
            out.print(_table(phase, judged))
        for line in _sentences(steps):
            out.print(Text(line))


def _table(phase: str, steps: Sequence[Step]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(phase, "", box=None, pad_edge=False)
    for column in ("matched", "judged", "values", "worst"):
        table.add_column(column, justify="right", no_wrap=True)
    for step in steps:
        outcome = _OUTCOMES.get(step.outcome, step.outcome)
        numbers = (f"{step.num_sites}", f"{step.num_values}", f"{step.worst_ratio:.3g}") if step.num_values else ()
        style = "" if step.outcome == "ok" else "bold"
        table.add_row(*map(Text, (_name(step), outcome, str(step.matched or ""), *numbers)), style=style)
    return table


def _name(step: Step) -> str:
    return f"{step.kind} {step.name}"


def _sentences(steps: Sequence[Step]) -> Iterator[str]:
    """Yield a line for each note, then one for each reason for which steps were skipped."""
    for step in steps:
        if step.num_values and step.num_whole:
            yield f"{_name(step)}: {step.num_whole} sites were judged by the whole graph"
        if step.note and step.outcome != "skipped":
            yield f"{_name(step)}: {step.note}"
    reasons: dict[str, list[str]] = {}
    for step in steps:
        if step.outcome == "skipped":
            reasons.setdefault(step.note, []).append(step.name)
    yield from (f"skipped: {', '.join(names)}: {reason}" for reason, names in reasons.items())
