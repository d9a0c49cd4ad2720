"""What the tests of area "passes" share: the cases of one pass run, and a smaller corpus."""

from __future__ import annotations

import pytest

from core.common.conformance import ConformanceProfile
from core.device import Device
from core_conformance.case import Case
from core_conformance.cases.passes import claims
from core_conformance.cases.passes import collect as area
from core_conformance.cases.passes.runs import CORPUS
from tests.conformance.support import run_case

KINDS = ("fires", "float32", "bfloat16", "float16", "near-miss", "identity")


def cases(device: Device) -> dict[str, Case]:
    """Return the cases of the area by id."""
    return {case.id: case for case in area.collect(device, ConformanceProfile())}


def failures(device: Device, *ids: str) -> dict[str, list[str]]:
    """Run the cases of these ids; return why each fails."""
    known = cases(device)
    return {name: run_case(known[name], device) for name in ids}


def of(device: Device, name: str, *kinds: str) -> dict[str, str]:
    """Run cases of one pass; return what each that fails says, by kind."""
    found = failures(device, *(f"passes/{name}/{kind}" for kind in kinds or KINDS))
    return {key.rpartition("/")[2]: "\n".join(reasons) for key, reasons in found.items() if reasons}


def keep(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave only these models of the corpus, to be done sooner."""
    for name in set(CORPUS) - set(names):
        monkeypatch.delitem(CORPUS, name)  # type: ignore[arg-type]  # a dict, though typed as what nobody changes


def elsewhere(monkeypatch: pytest.MonkeyPatch, **uuids: str) -> None:
    """Have passes be known by these identities in another process, and no others; to ask a real one takes seconds."""
    monkeypatch.setattr(claims, "_in_another_process", lambda device: uuids)
