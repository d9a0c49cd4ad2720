"""Every test begins and ends without compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.dynamo_backend import with_backend


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    """Let torch know the backend, and forget what it compiled."""
    with_backend()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
