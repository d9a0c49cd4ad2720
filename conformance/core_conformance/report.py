"""`Report`: everything one run of the suite found, as data; what terminal, JSON, JUnit and HTML are made from."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.device import PluginInfo
from core_conformance.case import Outcome

SCHEMA = "core.conformance/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where a run took place. versions: of packages, None where not installed. driver: as torch or the plugin tells.

    capabilities: those of the device, as JSON-ready values; device_name: the product. Both empty where it did not open.
    """

    device_name: str = ""
    capabilities: Mapping[str, Any]
    versions: Mapping[str, str | None]
    driver: str = ""
    platform: str = ""
    workers: int = 1
    threads: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run. name: the device as asked for. cases: id -> what a pass shows. level: what was asked for.

    reached: the level proven, None for none; obstacles: why not the next one. started: ISO 8601, UTC. elapsed_s: wall
    time of the whole run. chosen: the globs of cases that were asked for, empty for all.
    """

    name: str
    plugin: PluginInfo | None
    environment: Environment
    level: int
    fuzz: int
    seed: int
    started: str
    elapsed_s: float
    outcomes: tuple[Outcome, ...]
    cases: Mapping[str, str]
    reached: int | None
    obstacles: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        """How many cases have each status."""
        return Counter(outcome.status for outcome in self.outcomes)

    def repro(self, outcome: Outcome) -> str:
        """Return the command that runs this case again, alone and with the same seed."""
        parts = ["core", "conformance", "--device", self.name, "--case", outcome.id, "--seed", str(self.seed)]
        if self.fuzz and outcome.area == "fuzz":
            parts += ["--fuzz", str(self.fuzz)]
        return shlex.join(parts)
