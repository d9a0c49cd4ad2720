"""The conformance suite's cases on graphs and programs, over the real torch_npu and the plugin's backend."""

from __future__ import annotations

import pytest

from core.host.selection import conformance_profile, select_device
from core_conformance.case import Case
from core_conformance.cases.calls import collect as calls
from core_conformance.cases.graphs import collect as graphs
from core_conformance.trial import Trial

DEVICE = select_device("npu")
PROFILE = conformance_profile(DEVICE)
CASES = [
    case
    for case in (*graphs.collect(DEVICE, PROFILE), *calls.collect(DEVICE, PROFILE))
    if not case.not_supported and case.id not in PROFILE.not_supported
]


def test_every_mode_and_the_renewal_of_lists_are_covered() -> None:
    ids = {case.id for case in CASES}
    assert len(ids) > 120 and "graphs/host-arguments/full" in ids
    assert all(any(f"/{mode}" in each for each in ids) for mode in DEVICE.capabilities.modes)
    declared = [name for name in PROFILE.not_supported if name.startswith("graphs/")]
    assert declared and all(name.startswith("graphs/host-arguments/") for name in declared)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_case_holds(case: Case) -> None:
    trial = Trial("npu", lambda: (DEVICE, PROFILE))
    case.run(trial)
    assert not trial.failures
