"""For the rules of the house: the tree is read before them, and once for all."""

from __future__ import annotations

import pytest

from tests.house.rules import ROOT, modules


@pytest.fixture(scope="session", autouse=True)
def _tree_is_read() -> None:
    """Read the tree, which takes seconds, outside of the test that happens to come first."""
    modules(ROOT)
