"""Marks of parametrised tests: the cases that `make test` leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the cases of a parametrisation, all but the quick ones marked slow; a tuple holds several arguments."""
    found = list(cases)
    assert all(case in found for case in quick), f"no cases: {quick}"
    rows = [(case, case if isinstance(case, tuple) else (case,)) for case in found]
    return [pytest.param(*row, marks=() if case in quick else pytest.mark.slow) for case, row in rows]
