"""The errors of the pass manager, each naming the pass and its owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.errors import PassError

if TYPE_CHECKING:
    from core.common.passes.declaration import Pass
    from core.common.passes.results import NearMiss
    from core.compilation.rewrite.pass_report import PassReport


def failed(declared: Pass, error: Exception) -> PassError:
    """Return the error for a pass that raised, or left an invalid graph."""
    if isinstance(error, PassError):
        return error
    return PassError(
        f"running pass {declared.name!r} of {declared.owner}",
        found=f"{type(error).__name__}: {error}",
        remedy=f"leave it out (passes without {declared.name!r}) and report it to {declared.owner}",
    )


def conflict(report: PassReport, miss: NearMiss) -> PassError:
    """Return the error for a node that two passes claim."""
    return PassError(
        f"pass {report.name!r} of {report.owner} at {miss.site}",
        found=f"it claims node {miss.node!r}, which pass {miss.claimant} made",
        remedy="declare which of them comes after the other on purpose (after=…), or disable one",
    )


def broken_promise(report: PassReport) -> PassError:
    """Return the error for a pass that did not match as often as promised."""
    misses = "; ".join(f"{m.site}: {m.reason}" for m in report.near_misses) or "no near-miss reported"
    return PassError(
        f"pass {report.name!r} of {report.owner}, which owes {report.expected} matches",
        found=f"it matched {report.matched} ({misses})",
        remedy="look at the near-misses, or run without strict to go on unfused",
    )


def unverified(report: PassReport, reason: str) -> PassError:
    """Return the error for a pass whose result could not be judged."""
    return PassError(
        f"verifying pass {report.name!r} of {report.owner} ({report.matched} sites)",
        found=f"it was not verified: {reason}",
        remedy=f"mend that or give other examples; or leave the pass out (passes without {report.name!r}), or go on "
        "without strict",
    )


def left_undecided(report: PassReport, misses: Sequence[NearMiss]) -> PassError:
    """Return the error about sites skipped because of a trace or of the fake of an op, not because of the model."""
    first = misses[0]
    return PassError(
        f"pass {report.name!r} of {report.owner}, which matched {report.matched}",
        found=f"it left {len(misses)} sites for lack of an answer; the first is {first.site}: {first.reason}",
        remedy="the model runs unfused there; report it with the versions of torch and core: sizes are not what a "
        "rewriting should depend on",
    )
