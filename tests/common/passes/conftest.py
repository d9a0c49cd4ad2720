"""For the tests of passes: what passes share is described once for a process, not once for each manager of passes."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from core.common.passes.identity import Known, describing_once
from core.compilation.rewrite import manager

_DESCRIBED: Known = {}


@pytest.fixture(autouse=True)
def _described_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.name == "test_declaration.py":  # of these descriptions themselves
        return

    def shared(known: Known) -> AbstractContextManager[None]:
        return describing_once(_DESCRIBED)

    monkeypatch.setattr(manager, "describing_once", shared)
