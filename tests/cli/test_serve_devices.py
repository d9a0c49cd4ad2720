"""The same server on each device that needs no hardware; the simulated NPU is asked in the NPU plugin's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("httpx", reason="needs the extra 'dev'")
pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

import example_vendor
from tests.served import check_streams_of

pytestmark = pytest.mark.slow


def test_the_processor_streams_the_tokens_of_the_engine_alone(tmp_path: Path) -> None:
    check_streams_of("cpu", tmp_path, os.environ, modes={"decode": "compile", "prefill": "compile"})


def test_a_vendors_device_streams_the_tokens_of_the_engine_alone(tmp_path: Path) -> None:
    environment = example_vendor.environment(tmp_path)
    check_streams_of("acme", tmp_path, environment, modes={"decode": "full", "prefill": "piecewise"})
