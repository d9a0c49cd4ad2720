"""An engine that nobody watches says once that it is still compiling."""

from __future__ import annotations

import logging

import pytest

from core.engine import patience
from core.engine.patience import Patience
from tests.support import cpu


@pytest.mark.parametrize(("lowering", "advised"), [("inductor", True), ("inline", False)])
def test_a_long_compile_is_told_once_with_what_starts_at_once(
    lowering: str, advised: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    device = cpu()
    told = Patience(device, lowering)
    with caplog.at_level(logging.WARNING, "core.engine"):
        for now[0], done in ((1.0, 0), (21.0, 2), (60.0, 3)):
            told("capture", done, 18)
    (message,) = [each.getMessage() for each in caplog.records]
    assert "compiling for 21 s so far: capture, 2 of 18" in message
    assert ("(--lowering inline) starts at once" in message) is advised
