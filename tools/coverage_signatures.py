"""A few model types that together show every form of site that a sweep recorded, for the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sweeping import Result, versions

MAX_TYPES = 15
# A test judges numbers, for which fp32 is the sharper, and runs one phase of each type.
TESTED = ("decode-float32-sdpa", "prefill-float32-sdpa", "prefill-float32-eager")

Choice = tuple[str, str]
"""A model type and a variant."""


def choose(results: Sequence[Result]) -> tuple[list[Choice], list[str]]:
    """Return at most MAX_TYPES variants that cover the recorded signatures, greedily, and the signatures left over."""
    forms = {
        (result["type"], variant): set(result["variants"].get(variant, {}).get("signatures", ()))
        for result in results
        if result["stage"] == "done"
        for variant in TESTED
    }
    left = set().union(*forms.values())
    chosen: list[Choice] = []
    used: Counter[str] = Counter()
    while left and len(chosen) < MAX_TYPES:
        # Among equals the variant less used so far, so that the phases are mixed.
        best = max(sorted(forms), key=lambda one: (len(forms[one] & left), -used[one[1]]))
        chosen.append(best)
        used[best[1]] += 1
        left -= forms[best]
    return sorted(chosen), sorted(left)


def expectations(chosen: Sequence[Choice], results: Mapping[str, Result]) -> dict[str, Any]:
    """Return for each choice how many sites of each kind are lifted, of how many."""
    cases = []
    for name, variant in chosen:
        facts = results[name]["variants"][variant]
        sites, lifted = facts["num_sites"], facts["num_lifted"]
        counts = {kind: [lifted[kind], sites[kind]] for kind in sites if sites[kind]}
        cases.append({"type": name, "variant": variant, "lifted": counts})
    return {"versions": {key: value for key, value in versions().items() if key != "core"}, "cases": cases}
