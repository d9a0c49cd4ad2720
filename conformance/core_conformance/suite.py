"""All cases for one device: collected from what its plugin declares, in the same order in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import MAX_LEVEL, Case

Collector = Callable[[Device, ConformanceProfile], Iterable[Case]]

COLLECTORS: tuple[str, ...] = (
    "core_conformance.cases.torch_ops",
    "core_conformance.cases.ops",
    "core_conformance.cases.fakes",
    "core_conformance.cases.graphs",
    "core_conformance.cases.calls",
    "core_conformance.cases.passes",
    "core_conformance.cases.models",
    "core_conformance.cases.fuzz",
)
"""Modules with a function `collect(device, profile)` each; to add an area, add a line (and to `case.AREAS`)."""


def host_cases() -> tuple[Case, ...]:
    """Return the cases of level 0, which need no device to be known: they are about opening one."""
    from core_conformance.cases.host import CASES

    return CASES


def collect(device: Device, profile: ConformanceProfile, *, level: int = MAX_LEVEL, fuzz: bool = False) -> list[Case]:
    """Return the cases up to a level, in order, and those of fuzzing where asked for."""
    cases = list(host_cases())
    for module in COLLECTORS:
        found: Collector = import_module(module).collect
        cases += [case for case in found(device, profile) if case.level <= level or (fuzz and case.level > MAX_LEVEL)]
    names = [case.id for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"case ids must differ: {twice}"
    return cases
