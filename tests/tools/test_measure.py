"""Coverage of whole tiny models: a few types that show every form of site, with the counts and numbers they owe.

`python tools/sweep_coverage.py --expected tests/data/coverage.json` chooses the types and writes the counts.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.common.passes.standard import COMMON_PASSES
from lift_coverage.measure import VARIANTS, Coverage, Untraced, Variant, measure_type

FILE = Path(__file__).parents[1] / "data" / "coverage.json"
EXPECTED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
COMMAND = f"python tools/sweep_coverage.py --expected tests/data/{FILE.name}"
QUICK = "ernie4_5"
"""The type that `make test` measures; the others are slow."""
NAMES = {variant.name: variant for variant in VARIANTS}


def _other_versions() -> str:
    """Say where the installed versions are not those of the counts: other code of models has other sites."""
    installed = {name: version(name).partition("+")[0] for name in EXPECTED["versions"]}
    recorded = {name: number.partition("+")[0] for name, number in EXPECTED["versions"].items()}
    return "" if installed == recorded else f"counted with {recorded}, installed are {installed}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=f"{case['type']}-{case['variant']}", marks=() if case["type"] == QUICK else pytest.mark.slow
        )
        for case in EXPECTED["cases"]
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, on what models cache
def test_a_model_is_lifted_as_recorded_and_keeps_its_numbers(case: dict[str, Any]) -> None:
    if reason := _other_versions():
        pytest.skip(reason)
    ((_, found),) = measure_type(case["type"], COMMON_PASSES, [NAMES[case["variant"]]])
    assert isinstance(found, Coverage)
    assert not found.errors
    assert found.judged.passed, found.judged.reason or found.judged.unjudged
    lifted = {kind: [found.num_lifted[kind], count] for kind, count in found.num_sites.items() if count}
    # Better than recorded fails too: then the record is out of date.
    assert lifted == case["lifted"], f"if that is right, run: {COMMAND}\n" + "\n".join(map(str, found.missed))


def test_the_record_is_small_and_leaves_the_held_out_types_alone() -> None:
    from hashlib import sha256

    types = [case["type"] for case in EXPECTED["cases"]]
    assert 5 <= len(types) <= 15 and QUICK in types
    assert [name for name in types if int(sha256(name.encode()).hexdigest(), 16) % 3 == 0] == []


@pytest.mark.slow
def test_a_type_that_cannot_be_traced_is_reported_with_its_sites() -> None:
    variant = Variant("float32", "sdpa", "prefill")
    ((_, found),) = measure_type("dbrx", COMMON_PASSES, [variant])
    assert isinstance(found, Untraced)
    assert found.num_sites["layer_norm"] == 5
    assert "expert" in str(found.error)
