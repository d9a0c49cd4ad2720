"""The level that a run has proven, and why the next one is not proven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core_conformance.case import AREAS, MAX_LEVEL
from core_conformance.outcome import Outcome

_PROVES = ("pass", "not-supported")
_MAX_EXCUSED = 0.1
"""Share of an area's cases that a profile may excuse, one case always: a level says little of a device whose plugin
excuses more. A rule of this suite, not a measurement."""


def reached(
    outcomes: Sequence[Outcome], *, complete: bool = True, level: int = MAX_LEVEL
) -> tuple[int | None, tuple[str, ...]]:
    """Return the highest level proven, None for none, and why the next one is not, one line per reason.

    A level is proven where each of its cases and of the levels below passed or is declared not supported, every area
    has at least one pass, and the plugin's profile excuses no more than a tenth of an area. An expected failure is a
    failure that is known, and a skip proves nothing: neither grants a level. complete: every case of the levels ran (a
    choice of cases proves no level). level: the highest one asked for; of those above it nothing is said.
    """
    if not complete:
        return None, ("only some cases were chosen: a level takes all of them",)
    for asked in range(level + 1):
        obstacles = tuple(_obstacles(asked, outcomes))
        if obstacles:
            return (asked - 1 if asked else None), obstacles
    return level, ()


def _obstacles(level: int, outcomes: Sequence[Outcome]) -> Iterable[str]:
    for area, (own, _) in AREAS.items():
        if own != level:
            continue
        here = [outcome for outcome in outcomes if outcome.area == area]
        for outcome in here:
            if outcome.status not in _PROVES:
                yield f"{outcome.id}: {outcome.status}" + (f": {outcome.reason}" if outcome.reason else "")
        excused = sum(outcome.excused for outcome in here)
        judged = sum(outcome.excused or outcome.status != "not-supported" for outcome in here)
        if excused > max(1.0, _MAX_EXCUSED * judged):
            yield f"area {area!r}: the profile excuses {excused} of {judged} cases, more than a tenth"
        if not any(outcome.status == "pass" for outcome in here):
            yield f"area {area!r}: no case of it passed" if here else f"area {area!r}: no case of it ran"
