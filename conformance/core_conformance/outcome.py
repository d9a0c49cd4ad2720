"""What became of a case: its status, what it measured, and why."""

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
"""What makes a run fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One value judged. name: which value. criterion: "T0" to "T3". ratio: measured over bound; at most 1 passes.

    ratio is infinite where a bound of zero was broken. reason: why it fails, "" where it does not.
    """

    name: str
    criterion: str
    ratio: float
    reason: str = ""
    dtype: str = ""
    num_elements: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one case. reason: for everything but a pass, one line. detail: traceback or a process's output.

    elapsed_s: wall time in the worker, 0.0 for what did not run. notes: facts worth reading beside a pass. excused:
    not supported by a glob of the plugin's profile, not by what its other declarations say.
    """

    id: str
    status: Status
    reason: str = ""
    detail: str = ""
    elapsed_s: float = 0.0
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
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
