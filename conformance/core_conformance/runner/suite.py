"""All cases for one device: collected from what its plugin declares, in the same order in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import MAX_LEVEL, Case

Collector = Callable[[Device, ConformanceProfile], Iterable[Case]]

HOST = "core_conformance.cases.host.cases"
"""The module whose `CASES` are those of level 0."""

COLLECTORS: tuple[str, ...] = (
    "core_conformance.cases.ops.torch_ops",
    "core_conformance.cases.ops.long_states",
    "core_conformance.cases.ops.collect",
    "core_conformance.cases.ops.batches",
    "core_conformance.cases.fakes",
    "core_conformance.cases.graphs.collect",
    "core_conformance.cases.calls.collect",
    "core_conformance.cases.processes.collect",
    "core_conformance.cases.passes.collect",
    "core_conformance.cases.models.collect",
    "core_conformance.cases.ops.fuzz",
    "core_conformance.cases.calls.fuzz",
)
"""Modules with a function `collect(device, profile)` each; to add an area, add a line (and to `case.AREAS`)."""


def host_cases(module: str = HOST) -> tuple[Case, ...]:
    """Return the cases of level 0, which need no device to be known: they are about opening one."""
    cases: tuple[Case, ...] = import_module(module).CASES
    return cases


def collect(
    device: Device,
    profile: ConformanceProfile,
    *,
    level: int = MAX_LEVEL,
    fuzz: bool = False,
    host: str = HOST,
    collectors: Sequence[str] = COLLECTORS,
) -> list[Case]:
    """Return the cases up to a level, in order, and those of fuzzing where asked for. host, collectors: modules."""
    cases = list(host_cases(host))
    for module in collectors:
        found: Collector = import_module(module).collect
        cases += [case for case in found(device, profile) if case.level <= level or (fuzz and case.level > MAX_LEVEL)]
    names = [case.id for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"case ids must differ: {twice}"
    return cases
