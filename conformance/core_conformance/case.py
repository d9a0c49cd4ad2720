"""The parts of the suite: cases, and the areas they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_conformance.trial import Trial

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


COMPILED_TIMEOUT_S = 600.0
"""The time of a case that runs a device's kernels, which may be compiled at their first call, for each form of a call:
on an H200 those of attention took more than 120 s beside 19 other workers, with nothing compiled before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseInfo:
    """The description of a case, without its function, for other processes."""

    #: `area/subject/…`, stable from run to run; globs of vendors name it.
    id: str
    #: What a pass shows, one line.
    what: str
    #: Why the device is excused by its own declaration; "" for cases that run.
    not_supported: str = ""
    #: The time after which its worker is killed.
    timeout_s: float = 120.0
    #: Whether no other worker may use the device meanwhile, since the case measures the device's memory.
    exclusive: bool = False
    #: Whether it opens the device; False if it only reads a plugin's metadata.
    opens: bool = True

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

    @property
    def block(self) -> str:
        """Area and subject: cases of one block share work that a process keeps."""
        return "/".join(self.id.split("/")[:2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Case(CaseInfo):
    """One thing to prove."""

    #: Raises, or reports through the trial.
    run: Callable[[Trial], None]

    @property
    def info(self) -> CaseInfo:
        """The description of the case."""
        return CaseInfo(**{each.name: getattr(self, each.name) for each in fields(CaseInfo)})
