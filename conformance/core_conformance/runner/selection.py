"""Selects the cases of a run, and applies the plugin's declarations to their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from core.errors import UsageError
from core_conformance.case import MAX_LEVEL, CaseInfo
from core_conformance.outcome import Outcome
from core_conformance.rules.expectations import Expectations, matches
from core_conformance.runner.protocol import Collected

INEXCUSABLE = ("host/*", "torch/*", "ops/*/reference/*", "fakes/*/reference")
"""Cases that no profile can excuse: they are about the plugin's word, and about torch on the device. A device states
limits there through its capabilities."""


def choose(collected: Collected, *, level: int, fuzz: int = 0, chosen: Sequence[str] = ()) -> list[CaseInfo]:
    """Return the cases up to a level, those of fuzzing if asked for, and of these the ones that a glob names.

    Raises `UsageError` for a glob that names none of them, with the closest ids.
    """
    cases = [case for case in collected.cases if case.level <= level or (fuzz > 0 and case.level > MAX_LEVEL)]
    for glob in chosen:
        if not any(matches(glob, case.id) for case in cases):
            raise _unknown(glob, collected, cases)
    return [case for case in cases if not chosen or any(matches(glob, case.id) for glob in chosen)]


def _unknown(glob: str, collected: Collected, cases: Sequence[CaseInfo]) -> UsageError:
    asked = f"conformance cases {glob!r}"
    elsewhere = [case for case in collected.cases if matches(glob, case.id)]
    if elsewhere:
        fuzzing = elsewhere[0].level > MAX_LEVEL
        found = "they are cases of fuzzing" if fuzzing else f"they belong to level {elsewhere[0].level}"
        remedy = "give --fuzz a number of examples" if fuzzing else f"raise --level to {elsewhere[0].level}"
        return UsageError(asked, found=found, remedy=remedy)
    if collected.error is not None:
        found = f"the cases above level 0 could not be collected: {collected.problem}"
        return UsageError(asked, found=found, remedy=str(collected.error["remedy"]))
    known = [case.id for case in cases]
    # A glob resembles ids less than a misspelt id does, so compare only the part before its first star.
    stem = glob.partition("*")[0]
    close = get_close_matches(glob, known, n=3) or [id for id in known if stem and id.startswith(stem[: len(stem) - 1])]
    suggestion = f"; did you mean {', '.join(map(repr, close[:3]))}?" if close else ""
    return UsageError(
        asked,
        found=f"none of the {len(known)} cases has such an id{suggestion}",
        remedy="`core conformance --list` shows the cases of a device",
    )


class Rules:
    """What the plugin has declared: cases that it does not support, and failures that it expects."""

    def __init__(self, collected: Collected, expectations: Expectations) -> None:
        """Raise `UsageError` for an expected failure of a case that does not exist."""
        if collected.error is None:
            expectations.check(case.id for case in collected.cases)
        self._not_supported = collected.not_supported
        self._expectations = expectations
        self._version = "" if collected.plugin is None else collected.plugin.version

    def declared(self, case: CaseInfo) -> Outcome | None:
        """Return the outcome of a case that is declared not supported, by itself or by the profile; None: run it."""
        reason = case.not_supported
        excused = not reason and not any(matches(glob, case.id) for glob in INEXCUSABLE)
        if excused:
            reasons = (reason for glob, reason in self._not_supported.items() if matches(glob, case.id))
            # A reason left out is a failure of the profile's own case; the declaration stands.
            reason = next((text.strip() or "declared without a reason" for text in reasons), "")
        return Outcome(id=case.id, status="not-supported", reason=reason, excused=excused) if reason else None

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the outcome as expected failures make it."""
        return self._expectations.judge(outcome, self._version)
