"""The suite's cases of the plugin's passes that move codes, and of erased copies, over the real torch_npu.

Only on the passes' own examples: in a conformance run the corpus, and all other passes, come besides.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.host.selection import conformance_profile, select_device
from core_conformance.cases.passes import collect as area
from core_conformance.cases.passes.runs import CORPUS
from core_conformance.trial import Trial

DEVICE = select_device("npu")
PROFILE = conformance_profile(DEVICE)
CODED = tuple(declared.name for declared in DEVICE.passes if declared.traits.codes)
NUMBERS = tuple(f"passes/{name}/{dtype}" for name in CODED for dtype in ("bfloat16", "float16"))
CASES = {case.id: case for case in area.collect(DEVICE, PROFILE)}


@pytest.fixture(autouse=True, scope="module")
def own_examples_alone() -> Iterator[None]:
    """Leave out the corpus, in which most of these passes find nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(CORPUS):
            patch.delitem(CORPUS, name)  # type: ignore[arg-type]  # a dict, though typed as what nobody changes
        yield


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*NUMBERS, "passes/erase_npu_copies/near-miss"])
def test_the_case_holds(name: str) -> None:
    trial = Trial("npu", lambda: (DEVICE, PROFILE))
    CASES[name].run(trial)
    assert not trial.failures
