"""What the suite is made of: cases, the areas they belong to, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from core_conformance.trial import Trial

Status = Literal["pass", "fail", "not-supported", "xfail", "xpass", "crash", "timeout", "skip"]
"""pass, fail: what the case found. not-supported: declared by the plugin. xfail, xpass: listed as an expected failure,
and failed or did not. crash, timeout: the worker process died, or was killed. skip: this environment lacks what the
case needs, which nobody declared."""

STATUSES: tuple[Status, ...] = ("pass", "fail", "not-supported", "xfail", "xpass", "crash", "timeout", "skip")
BAD: frozenset[Status] = frozenset({"fail", "xpass", "crash", "timeout"})
"""What makes a run fail."""

MAX_LEVEL = 3
FUZZ = "fuzz"
"""The one area without a level: its cases run on request only."""

AREAS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "host": (0, "loading, metadata, probe, errors"),
        "torch": (1, "the device's own torch operators, the yardstick of all that follows"),
        "ops": (1, "canonical ops and the device's implementations of them"),
        "fakes": (1, "fake kernels against real ones"),
        "graphs": (2, "capture and replay"),
        "passes": (2, "graph passes: that they fire and are right"),
        "models": (3, "whole models"),
        FUZZ: (MAX_LEVEL + 1, "random shapes, strides and options, on request"),
    }
)
"""Area -> the level it belongs to, and what it covers. The first part of a case's id is its area."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to prove. id: `area/subject/…`, stable from run to run; globs of vendors name it.

    what: what a pass shows, one line. run: raises or reports through the trial. not_supported: why the device need not
    run it, by its own declaration; "" for cases that run. timeout_s: after which its worker is killed. exclusive: no
    other worker may use the device meanwhile (it measures the device's memory).
    """

    id: str
    what: str
    run: Callable[[Trial], None]
    not_supported: str = ""
    timeout_s: float = 120.0
    exclusive: bool = False

    def __post_init__(self) -> None:
        assert self.area in AREAS, self.id

    @property
    def area(self) -> str:
        """The first part of the id."""
        return self.id.partition("/")[0]

    @property
    def level(self) -> int:
        """The level that the case belongs to; above `MAX_LEVEL` for fuzzing."""
        return AREAS[self.area][0]


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
