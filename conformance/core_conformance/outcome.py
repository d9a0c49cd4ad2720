"""The outcome of a case: its status, measurements and reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "fail", "not-supported", "xfail", "xpass", "crash", "timeout", "skip"]
"""pass, fail: what the case found. not-supported: declared by the plugin. xfail, xpass: listed as an expected failure,
and failed or did not. crash, timeout: the worker process died, or was killed. skip: this environment lacks what the
case needs, which nobody declared."""

STATUSES: tuple[Status, ...] = ("pass", "fail", "not-supported", "xfail", "xpass", "crash", "timeout", "skip")
BAD: frozenset[Status] = frozenset({"fail", "xpass", "crash", "timeout"})
"""The statuses that make a run fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One value judged."""

    name: str
    #: "T0" to "T3".
    criterion: str
    #: Measured over bound: at most 1 passes, and infinity says that a bound of zero was broken.
    ratio: float
    #: Why it fails, "" where it does not.
    reason: str = ""
    dtype: str = ""
    num_elements: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one case."""

    id: str
    status: Status
    #: Why it did not pass, one line.
    reason: str = ""
    #: A traceback, or what the process printed.
    detail: str = ""
    #: Wall time in the worker, 0.0 for what did not run.
    elapsed_s: float = 0.0
    measurements: tuple[Measurement, ...] = ()
    #: Notes for the report.
    notes: tuple[str, ...] = ()
    #: Whether it is not supported by a glob of the plugin's profile, and not by another of its declarations.
    excused: bool = False

    @property
    def area(self) -> str:
        """The first part of the id."""
        return self.id.partition("/")[0]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Outcome:
        """Return the outcome that `to_json` wrote (a ratio of null was not finite)."""
        measured = (
            Measurement(**{**item, "ratio": float("inf") if item["ratio"] is None else item["ratio"]})
            for item in fields["measurements"]
        )
        return cls(**{**fields, "measurements": tuple(measured), "notes": tuple(fields["notes"])})
