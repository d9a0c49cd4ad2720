"""core_conformance/rules/levels.py: what grants a level and what does not."""

from __future__ import annotations

import pytest

from core_conformance.case import AREAS, MAX_LEVEL, CaseInfo
from core_conformance.outcome import STATUSES, Outcome, Status
from core_conformance.rules.expectations import Expectations
from core_conformance.rules.levels import reached
from core_conformance.runner.protocol import Collected
from core_conformance.runner.selection import Rules

ALL = [Outcome(id=f"{area}/one", status="pass") for area, (level, _) in AREAS.items() if level <= MAX_LEVEL]


def with_case(id: str, status: Status) -> list[Outcome]:
    return [*ALL, Outcome(id=id, status=status, reason="" if status == "pass" else "because")]


def without(area: str) -> list[Outcome]:
    return [outcome for outcome in ALL if outcome.area != area]


def test_all_passed_is_the_highest_level() -> None:
    assert reached(ALL) == (MAX_LEVEL, ())


@pytest.mark.parametrize("status", STATUSES)
def test_only_passes_and_declared_limits_grant_a_level(status: Status) -> None:
    level, obstacles = reached(with_case("graphs/two", status))
    if status in ("pass", "not-supported"):
        assert (level, obstacles) == (MAX_LEVEL, ())
    else:
        assert (level, obstacles) == (1, (f"graphs/two: {status}: because",))


@pytest.mark.parametrize(("id", "level"), [("host/x", None), ("torch/x", 0), ("fakes/x", 0), ("models/x", 2)])
def test_a_failure_stands_in_the_way_of_its_level_and_those_above(id: str, level: int | None) -> None:
    assert reached(with_case(id, "fail")) == (level, (f"{id}: fail: because",))


def test_obstacles_are_those_of_the_next_level_only() -> None:
    outcomes = [*with_case("ops/x", "fail"), Outcome(id="models/x", status="crash"), Outcome(id="ops/y", status="skip")]
    assert reached(outcomes) == (0, ("ops/x: fail: because", "ops/y: skip"))


@pytest.mark.parametrize(("area", "level"), [("host", None), ("ops", 0), ("passes", 1), ("models", 2)])
def test_an_area_without_a_pass_proves_nothing(area: str, level: int | None) -> None:
    assert reached(without(area)) == (level, (f"area {area!r}: no case of it ran",))
    declared = Outcome(id=f"{area}/one", status="not-supported", reason="never")
    assert reached([*without(area), declared]) == (level, (f"area {area!r}: no case of it passed",))


def test_a_level_that_was_not_asked_for_is_not_missed() -> None:
    lower = [outcome for outcome in ALL if AREAS[outcome.area][0] <= 1]
    assert reached(lower, level=1) == (1, ())
    assert reached(lower) == (1, tuple(f"area {area!r}: no case of it ran" for area in ("graphs", "passes")))
    assert reached(with_case("models/x", "fail"), level=1) == (1, ())


def test_a_choice_of_cases_proves_no_level() -> None:
    level, obstacles = reached(ALL, complete=False)
    assert level is None and len(obstacles) == 1 and "only some cases were chosen" in obstacles[0]


@pytest.mark.parametrize("status", ["fail", "pass"])
def test_fuzzing_has_no_say(status: Status) -> None:
    assert reached(with_case("fuzz/x", status)) == (MAX_LEVEL, ())


def test_nothing_proves_nothing() -> None:
    assert reached([]) == (None, ("area 'host': no case of it ran",))


@pytest.mark.parametrize(("excused", "level"), [(1, MAX_LEVEL), (2, MAX_LEVEL), (3, 1)])
def test_a_profile_that_excuses_much_grants_no_level(excused: int, level: int) -> None:
    others = [Outcome(id=f"graphs/{number}", status="pass") for number in range(17)]
    left_out = [
        Outcome(id=f"graphs/x{n}", status="not-supported", reason="later", excused=True) for n in range(excused)
    ]
    found, obstacles = reached([*ALL, *others, *left_out])
    assert found == level
    if level != MAX_LEVEL:
        assert obstacles == ("area 'graphs': the profile excuses 3 of 21 cases, more than a tenth",)


def test_what_other_declarations_say_is_free() -> None:
    derived = [Outcome(id=f"graphs/x{n}", status="not-supported", reason="no such mode") for n in range(50)]
    assert reached([*ALL, *derived]) == (MAX_LEVEL, ())


@pytest.mark.parametrize(
    ("id", "excused"),
    [
        ("host/open", False),
        ("host/profile", False),
        ("torch/gelu/float32", False),
        ("ops/rms_norm/reference/float32", False),
        ("fakes/rms_norm/reference", False),
        ("ops/rms_norm/own/float32", True),
        ("models/llama/float32/logits", True),
    ],
)
def test_a_profile_excuses_no_case_about_the_plugins_word(id: str, excused: bool) -> None:
    case = CaseInfo(id=id, what="")
    collected = Collected(cases=(case,), name="own", not_supported={"*": "later"})
    outcome = Rules(collected, Expectations()).declared(case)
    assert (outcome is not None and outcome.excused) is excused
