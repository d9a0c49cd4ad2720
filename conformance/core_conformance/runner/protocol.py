"""What a run's parent and its workers tell each other, as data that goes through JSON; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from core.device import PluginInfo
from core_conformance.case import Case
from core_conformance.runner.suite import COLLECTORS, HOST

DEFAULT_THREADS = 1
"""Cases are small, and a second thread costs more than it gives: on two cores that others use too, one worker took
five times as long for areas ops and graphs with two threads. It also keeps sums in one order on every machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteModules:
    """Where the cases come from. host: module with `CASES`; collectors: modules with `collect(device, profile)`."""

    host: str = HOST
    collectors: tuple[str, ...] = COLLECTORS


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """What a worker process is started with. threads: of torch, None for `DEFAULT_THREADS`. fuzz: see `Trial`."""

    device: str
    seed: int = 0
    fuzz: int = 0
    threads: int | None = None
    suite: SuiteModules = field(default_factory=SuiteModules)

    def to_argument(self) -> str:
        """Return the worker's command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> WorkerOptions:
        """Return the options that `to_argument` wrote."""
        fields = json.loads(text)
        suite = fields.pop("suite")
        return cls(**fields, suite=SuiteModules(host=suite["host"], collectors=tuple(suite["collectors"])))


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseInfo:
    """A case without what it runs; fields as in `Case`."""

    id: str
    what: str
    level: int
    not_supported: str = ""
    timeout_s: float = 120.0
    exclusive: bool = False

    @property
    def area(self) -> str:
        """The first part of the id."""
        return self.id.partition("/")[0]

    @property
    def block(self) -> str:
        """Area and subject: cases of one block share work that a process keeps."""
        return "/".join(self.id.split("/")[:2])

    @classmethod
    def of(cls, case: Case) -> CaseInfo:
        """Return what is told of a case."""
        names = ("id", "what", "level", "not_supported", "timeout_s", "exclusive")
        return cls(**{name: getattr(case, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a worker found. cases: of all levels and of fuzzing; those of level 0 alone where `error` is set.

    error: why the others could not be collected, as in core.error/1; None where they were. detail: traceback, or what
    the process printed. name: the device by name, where "auto" was asked for too. environment: see
    `report.Environment`; plugin: None where no one plugin has that name. not_supported: globs and reasons of the
    plugin's profile.
    """

    cases: tuple[CaseInfo, ...]
    name: str
    error: Mapping[str, Any] | None = None
    detail: str = ""
    plugin: PluginInfo | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    not_supported: Mapping[str, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why cases of levels above 0 are missing, in one line; "" where none is."""
        return "" if self.error is None else " ".join(str(self.error["found"]).split())

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Collected:
        """Return what `to_json` wrote."""
        plugin = fields["plugin"]
        return cls(
            **{
                **fields,
                "cases": tuple(CaseInfo(**item) for item in fields["cases"]),
                "plugin": None if plugin is None else PluginInfo(**plugin),
            }
        )
