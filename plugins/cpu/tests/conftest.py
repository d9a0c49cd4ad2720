"""For tests that run the extension: it is compiled before a test's time counts."""

from __future__ import annotations

import pytest

from core_cpu import extension


@pytest.fixture(scope="session")
def kernels() -> None:
    """Load the extension; skip where this machine can't build it."""
    if reason := extension.why_not():
        pytest.skip(reason)
    assert extension.load() == ""
