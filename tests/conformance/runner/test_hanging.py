"""A device that hangs when it is opened costs a run that time once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core_conformance.runner.session import Options, run

InstallVendor = Callable[..., Any]

HANGS = """
import time
from pathlib import Path

@hookimpl
def core_open_device(context):
    with Path({path!r}).open("a") as file:
        file.write("x")
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_device_that_hangs_is_opened_once_and_judged_once(tmp_path: Path, install_vendor: InstallVendor) -> None:
    opened = tmp_path / "opened"
    install_vendor(plugin=HANGS.format(path=str(opened)))
    report = run(Options(device="acme", timeout_factor=0.1, workers=3))
    assert len(opened.read_text()) == 1
    found = [(outcome.status, outcome.id) for outcome in report.outcomes]
    assert found[:2] == [("pass", "host/metadata"), ("timeout", "host/probe")]
    assert len(found) > 10 and {status for status, _ in found[2:]} == {"skip"}
    assert "gave no answer within 30 s" in report.outcomes[1].reason
    assert report.reached is None
    assert "could not be collected: the process that opened the device" in report.obstacles[0]
