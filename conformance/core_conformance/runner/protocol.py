"""The messages between a run's parent and its workers, as JSON data; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from core.device import PluginInfo
from core_conformance.case import CaseInfo
from core_conformance.ranks import DEFAULT_RANKS
from core_conformance.runner.suite import COLLECTORS, HOST

DEFAULT_THREADS = 1
"""Cases are small, and a second thread costs more than it gives. On two cores that others use too, a worker with two
threads took five times as long for areas ops and graphs. One thread also keeps sums in one order on every machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteModules:
    """Where the cases come from."""

    #: The module with `CASES`, those of level 0.
    host: str = HOST
    #: The modules with `collect(device, profile)`.
    collectors: tuple[str, ...] = COLLECTORS


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """The options of a worker process."""

    #: The device as asked for.
    device: str
    seed: int = 0
    #: Examples that each case of fuzzing tries.
    fuzz: int = 0
    #: Threads of torch, None for `DEFAULT_THREADS`.
    threads: int | None = None
    #: Multiplies the time that each case, and collecting, may take.
    timeout_factor: float = 1.0
    #: Processes of each case that runs in several.
    ranks: int = DEFAULT_RANKS
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
class Collected:
    """A worker's answer to collecting."""

    #: The cases of all levels and of fuzzing; those of level 0 alone where `error` is set.
    cases: tuple[CaseInfo, ...]
    #: The device's name; for "auto", the name of the device that was chosen.
    name: str
    #: Why the cases above level 0 could not be collected, as in core.error/1; None where they were.
    error: Mapping[str, Any] | None = None
    #: The traceback of the error, or what the process printed.
    detail: str = ""
    #: None unless exactly one plugin has that name.
    plugin: PluginInfo | None = None
    #: See `report.Environment`.
    environment: Mapping[str, Any] = field(default_factory=dict)
    #: Globs and reasons of the plugin's profile.
    not_supported: Mapping[str, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why cases of levels above 0 are missing, in one line; "" if they are all there."""
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
