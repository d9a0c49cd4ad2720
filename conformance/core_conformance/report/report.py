"""`Report`: everything one run of the suite found, as data; what terminal, JSON, JUnit and HTML are made from."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from core.device import PluginInfo
from core_conformance.case import AREAS, MAX_LEVEL
from core_conformance.outcome import BAD, STATUSES, Measurement, Outcome
from core_conformance.ranks import DEFAULT_RANKS, is_ranked

SCHEMA = "core.conformance/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where a run took place."""

    #: The product; "" where the device did not open.
    device_name: str = ""
    #: The device's capabilities as JSON-ready values; empty if it did not open.
    capabilities: Mapping[str, Any]
    #: Of each package; None where it is not installed.
    versions: Mapping[str, str | None]
    #: The driver's version, from torch or the plugin.
    driver: str = ""
    platform: str = ""
    workers: int = 1
    threads: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {
            "device_name": self.device_name,
            "capabilities": dict(self.capabilities),
            "versions": dict(self.versions),
            "driver": self.driver,
            "platform": self.platform,
            "workers": self.workers,
            "threads": self.threads,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Environment:
        """Return the environment that `to_json` wrote; fields of a newer version are left out."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything that one run of the suite found."""

    #: The device, as it was asked for.
    name: str
    plugin: PluginInfo | None
    environment: Environment
    #: The level that was asked for.
    level: int
    #: Examples of each fuzzing case; 0 for a run without them.
    fuzz: int
    seed: int
    #: ISO 8601, UTC.
    started: str
    #: Wall time of the whole run.
    elapsed_s: float
    outcomes: tuple[Outcome, ...]
    #: Id -> what a pass of the case shows.
    cases: Mapping[str, str]
    #: The level proven; None for none.
    reached: int | None
    #: Why the next level is not proven.
    obstacles: tuple[str, ...] = ()
    #: The globs of cases that were asked for; empty for all.
    chosen: tuple[str, ...] = ()
    #: Processes of each case that runs in several.
    ranks: int = DEFAULT_RANKS

    @property
    def counts(self) -> Counter[str]:
        """How many cases have each status."""
        return Counter(outcome.status for outcome in self.outcomes)

    @property
    def passed(self) -> bool:
        """Whether something was proven and nothing is wrong: what a command's exit code tells."""
        return any(outcome.status == "pass" for outcome in self.outcomes) and not BAD & self.counts.keys()

    @property
    def suite(self) -> str:
        """Version of the suite that ran, which is that of `core`."""
        return self.environment.versions.get("core") or ""

    def repro(self, outcome: Outcome) -> str:
        """Return the command that runs this case again, alone and with the same seed."""
        parts = ["core", "conformance", "--device", self.name, "--case", outcome.id, "--seed", str(self.seed)]
        if self.fuzz and outcome.area == "fuzz":
            parts += ["--fuzz", str(self.fuzz)]
        if self.ranks != DEFAULT_RANKS and is_ranked(outcome.id):
            parts += ["--ranks", str(self.ranks)]
        return shlex.join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of core.conformance/1 (docs/json.md) as JSON-ready values, schema and core apart."""
        from core.cli.devices import plugin_json

        return {
            "suite": self.suite,
            "device": self.name,
            "plugin": None if self.plugin is None else plugin_json(self.plugin),
            "environment": self.environment.to_json(),
            "level": self.level,
            "fuzz": self.fuzz,
            "seed": self.seed,
            "ranks": self.ranks,
            "chosen": list(self.chosen),
            "started": self.started,
            "elapsed_s": self.elapsed_s,
            "reached": self.reached,
            "obstacles": list(self.obstacles),
            "passed": self.passed,
            "counts": {status: self.counts[status] for status in STATUSES},
            "cases": [self._case_json(outcome) for outcome in self.outcomes],
        }

    def _case_json(self, outcome: Outcome) -> dict[str, Any]:
        level = AREAS[outcome.area][0]
        worst = worst_ratio(outcome)
        return {
            "id": outcome.id,
            "area": outcome.area,
            "level": None if level > MAX_LEVEL else level,
            "what": self.cases.get(outcome.id, ""),
            "status": outcome.status,
            "reason": outcome.reason,
            "detail": outcome.detail,
            "elapsed_s": outcome.elapsed_s,
            "worst_ratio": None if worst is None else finite(worst),
            "measurements": [asdict(item) | {"ratio": finite(item.ratio)} for item in outcome.measurements],
            "notes": list(outcome.notes),
            "excused": outcome.excused,
            "repro": self.repro(outcome),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Report:
        """Return the report that `to_json` wrote; derived fields and those of a newer version are left out.

        The document must be valid by report.schema.json: `core_conformance.report.write.load` sees to that.
        """
        plugin = document["plugin"]
        plain = ("level", "fuzz", "seed", "started", "elapsed_s", "reached")
        return cls(
            name=document["device"],
            plugin=None if plugin is None else _plugin(document["device"], plugin),
            environment=Environment.from_json(document["environment"]),
            outcomes=tuple(_outcome(item) for item in document["cases"]),
            cases={item["id"]: item["what"] for item in document["cases"]},
            obstacles=tuple(document["obstacles"]),
            chosen=tuple(document["chosen"]),
            ranks=document.get("ranks", DEFAULT_RANKS),  # documents of older suites have no such field
            **{name: document[name] for name in plain},
        )


def worst_ratio(outcome: Outcome) -> float | None:
    """Return the largest ratio of a case, NaN counted as infinite; None where nothing was measured."""
    ratios = (math.inf if math.isnan(item.ratio) else item.ratio for item in outcome.measurements)
    return max(ratios, default=None)


def finite(ratio: float) -> float | None:
    """Return a ratio as JSON has it: null where it is not finite."""
    return ratio if math.isfinite(ratio) else None


def _plugin(device: str, fields: Mapping[str, Any]) -> PluginInfo:
    names = ("distribution", "version", "entry_point", "requires_core", "in_tree")
    return PluginInfo(device=device, probe_entry_point=fields["probe"], **{name: fields[name] for name in names})


def _outcome(fields: Mapping[str, Any]) -> Outcome:
    measured = [{name: item[name] for name in Measurement.__dataclass_fields__} for item in fields["measurements"]]
    return Outcome.from_json({name: fields[name] for name in Outcome.__dataclass_fields__} | {"measurements": measured})
