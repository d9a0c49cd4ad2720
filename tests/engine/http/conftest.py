"""Fixtures of the server's tests: one engine for all, and a server for each module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from core.engine.serve.engine import Engine
    from tests.engine.http.serving import Brake, Served


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The embedded model with room for four sequences; idle between tests."""
    from tests.engine.http.serving import load

    with load() as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    """A server for all tests of a module that leave it as it is."""
    from tests.engine.http.serving import serving

    with serving(engine) as served:
        yield served


@pytest.fixture
def brake(engine: Engine) -> Iterator[Brake]:
    """What holds the engine's steps up; gone after the test."""
    from tests.engine.http.serving import Brake

    brake = Brake(engine)
    yield brake
    brake.remove()
