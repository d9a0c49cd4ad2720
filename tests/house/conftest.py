"""For the rules of the house: the tree is read before them, and once for all."""

from __future__ import annotations

import gc

import pytest

from tests.house.rules import ROOT, modules


@pytest.fixture(scope="session", autouse=True)
def _tree_is_read() -> None:
    """Read the tree, which takes seconds, outside of the test that happens to come first.

    The collector would take three times as long as the reading: all of these syntax trees stay.
    """
    gc.disable()
    modules(ROOT)
    gc.freeze()
    gc.enable()
