"""For tests of the plugin's kernels: skipped with the reason where this machine can't build them."""

from __future__ import annotations

import pytest

from core_cpu import extension


@pytest.fixture(scope="session")
def kernels() -> None:
    if reason := extension.why_not():
        pytest.skip(reason)
    assert extension.load() == ""
