"""The account of one pass on one graph."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from core.common.passes.pass_guards import Stage
from core.common.passes.results import NearMiss

VERIFIED = "verified"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """What one pass did to one graph."""

    name: str
    owner: str
    stage: Stage
    matched: int
    expected: int | None
    elapsed_ms: float
    sites: tuple[str, ...]
    near_misses: tuple[NearMiss, ...]
    #: Why its guards refused the graph; empty where it ran.
    skipped: str = ""
    #: Why it was undone; empty where it was not.
    error: str = ""
    #: Its identity where it matched, else empty: it takes milliseconds to find.
    uuid: str = ""
    #: Ops whose codes it may move by a step (`PassTraits.codes`).
    codes: tuple[str, ...] = ()
    #: "verified", or "not verified: " and why it could not be judged. Empty where nobody asked, or nothing matched.
    verification: str = ""

    def summary(self) -> str:
        """Return one line: matches, near-misses and time, or why it was skipped or undone."""
        if self.skipped:
            return f"pass {self.name}: skipped, {self.skipped}"
        if self.error:
            return f"pass {self.name}: UNDONE, {' '.join(self.error.split())}"
        owed = f" of {self.expected} owed" if self.expected is not None else ""
        near = f", {len(self.near_misses)} near-misses" if self.near_misses else ""
        verified = f", {self.verification}" if self.verification else ""
        return f"pass {self.name}: {self.matched}{owed} matched{near} in {self.elapsed_ms:.1f} ms{verified}"

    @property
    def has_news(self) -> bool:
        """Whether it did anything, failed, or had near-misses or owed sites, that a report should name.

        A pass that was skipped did nothing: on each device and model many are, and `to_json` has the reasons.
        """
        return bool(self.matched or self.error or self.near_misses or self.expected)

    @property
    def is_unverified(self) -> bool:
        """True where it was to be verified and could not be."""
        return self.verification not in ("", VERIFIED)

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        return asdict(self)
