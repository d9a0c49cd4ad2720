"""The mark `cases`: which cases `make test` runs, and that `make test-slow` runs all the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import conftest

PLANTED = """
import pytest

@pytest.mark.cases(3)
@pytest.mark.parametrize("number", range(8))
def test_spread(number): ...

@pytest.mark.cases(1)
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_marked(number): ...

@pytest.mark.cases(5)
@pytest.mark.parametrize("number", range(3))
def test_fewer(number): ...

def test_plain(): ...
"""
QUICK = ["spread[0]", "spread[3]", "spread[7]", "marked[1]", "fewer[0]", "fewer[1]", "fewer[2]", "plain"]
SLOW = ["spread[1]", "spread[2]", "spread[4]", "spread[5]", "spread[6]", "marked[0]", "marked[2]"]


class Collecting:
    """The root conftest's choice, and what is left to run after it."""

    pytest_collection_modifyitems = staticmethod(conftest.pytest_collection_modifyitems)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid.removeprefix("test_planted.py::test_") for item in session.items]


def collected(folder: Path, target: str, *arguments: str) -> list[str]:
    """Return the cases that this target of the Makefile runs."""
    recipes = Path(conftest.__file__).with_name("Makefile").read_text(encoding="utf-8")
    found = re.search(rf'^{target}:.*?-m "(.*?)"', recipes, re.MULTILINE | re.DOTALL)
    assert found
    (folder / "test_planted.py").write_text(PLANTED)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    cases\n")
    options = ["-q", "--collect-only", "--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    collecting = Collecting()
    pytest.main([*options, "-m", found[1], *arguments, str(folder)], plugins=[collecting])
    return collecting.names


def test_each_case_is_in_one_of_both_runs(tmp_path: Path) -> None:
    assert collected(tmp_path, "test") == QUICK
    assert collected(tmp_path, "test-slow") == SLOW


def test_the_choice_of_names_does_not_change_which_cases_are_quick(tmp_path: Path) -> None:
    assert collected(tmp_path, "test", "-k", "spread and not 0") == ["spread[3]", "spread[7]"]
