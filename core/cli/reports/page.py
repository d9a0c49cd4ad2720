"""What `core run` found as one HTML page: its table, and where the time of the start and of the first steps went.

The page holds its style, has no script and loads nothing. All text is escaped by the template engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from core.cli.reports.timeline import RunTimeline, Span, StepSpan

_FIRST_STEPS = 24
_BRIEF_S = 0.05
"""Phases of a run below this stand in one row with their neighbours."""


def to_html(title: str, rows: Sequence[tuple[str, str]], timeline: RunTimeline) -> str:
    """Return the page. rows: name and text of each fact, as the table in a terminal has them."""
    import jinja2

    source = files("core").joinpath("assets", "run.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    spans, steps = timeline.spans(), timeline.steps
    total = spans[-1].end_s
    return environment.from_string(source).render(
        title=title,
        rows=rows,
        total=total,
        phases=[_bar(span, total) for span in _joined(spans)],
        steps=_step_bars(steps[:_FIRST_STEPS]),
        num_steps=len(steps),
        behind=_summary(steps[_FIRST_STEPS:]),
    )


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with each row of brief ones as one."""
    found: list[Span] = []
    brief: list[Span] = []
    for span in [*spans, None]:
        if span is not None and span.seconds < _BRIEF_S:
            brief.append(span)
            continue
        if brief:
            names = ", ".join(dict.fromkeys(each.name for each in brief))
            found.append(Span(names, brief[0].start_s, brief[-1].end_s))
            brief = []
        if span is not None:
            found.append(span)
    return found


def _bar(span: Span, total: float) -> dict[str, Any]:
    return {"name": span.name, "time": _time(span.seconds), "parts": [_part("run", span.start_s, span.end_s, total)]}


def _step_bars(steps: Sequence[StepSpan]) -> list[dict[str, Any]]:
    if not steps:
        return []
    first, last = steps[0].start_s, max(step.end_s for step in steps)
    return [
        {
            "name": _step_name(index, step),
            "time": _time(step.end_s - step.start_s),
            "parts": [
                _part("run", step.start_s - first, step.start_s + step.begin_s - first, last - first),
                _part("wait", step.wait_start_s - first, step.end_s - first, last - first),
            ],
        }
        for index, step in enumerate(steps, 1)
    ]


def _step_name(index: int, step: StepSpan) -> str:
    often = f", {step.times} times" if step.times > 1 else ""
    return f"{index}  {step.phase}, {step.tokens} {'token' if step.tokens == 1 else 'tokens'}{often}"


def _part(kind: str, start: float, end: float, total: float) -> dict[str, Any]:
    scale = 100 / total if total else 0.0
    return {"kind": kind, "left": f"{start * scale:.2f}", "width": f"{max((end - start) * scale, 0.1):.2f}"}


def _summary(steps: Sequence[StepSpan]) -> str:
    """Say in one line what followed the steps that are shown; "" for nothing."""
    if not steps:
        return ""
    each = sorted((step.end_s - step.start_s) / step.times for step in steps)
    took = steps[-1].end_s - steps[0].start_s
    return f"{len(steps)} more, in {_time(took)}; half of them took up to {_time(each[len(each) // 2])} each"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
